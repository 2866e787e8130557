// Text in, text out: the model's own tokenizer.json and chat template, read by the libraries in libraries.json.

import { Template } from "./jinja.mjs";
import { Tokenizer } from "./tokenizers.min.mjs";

/** The tokens of texts, and the text of tokens. */
export class Text {
  #tokenizer;
  #template;
  #settings;

  /**
   * Load the tokenizer.
   *
   * @param {object} settings page.json's entry `text`: addresses, chat template, special tokens, and texts with the
   *   tokens that they have in Python
   * @param {string} base of the addresses
   */
  static async open(settings, base) {
    const text = new Text();
    const read = async (address) => (await fetch(new URL(address, base))).json();
    const config = settings.config ? await read(settings.config) : {};
    // The spaces before punctuation that a configuration may ask to remove stay: they are the model's.
    text.#tokenizer = new Tokenizer(await read(settings.tokenizer), { ...config, clean_up_tokenization_spaces: false });
    text.#settings = settings;
    text.#template = settings.template && new Template(settings.template);
    for (const { text: known, ids } of settings.checks) {
      const found = text.#tokenizer.encode(known).ids;
      if (found.length !== ids.length || found.some((id, index) => id !== ids[index])) {
        throw new Error(`This browser's tokenizer reads ${JSON.stringify(known)} otherwise than the model's own.`);
      }
    }
    return text;
  }

  /** Whether there is a chat template. */
  get chats() {
    return Boolean(this.#template);
  }

  /** The tokens of a text, or of the conversation that it begins. */
  tokens(typed, chat) {
    if (typed === "") return [];
    if (!chat) return this.#tokenizer.encode(typed).ids;
    const messages = [{ role: "user", content: typed }];
    const formatted = this.#template.render({
      ...this.#settings.special,
      messages,
      add_generation_prompt: true,
      tools: null,
      documents: null,
    });
    return this.#tokenizer.encode(formatted, { add_special_tokens: false }).ids;
  }

  /** A function that takes one token after another, and returns the text that each adds. */
  stream() {
    const tokens = [];
    let shown = "";
    return (token) => {
      if (token !== undefined) tokens.push(token);
      const whole = tokens.length ? this.#tokenizer.decode(tokens, { skip_special_tokens: true }) : "";
      // A character whose last byte has not come yet is held back.
      if ((token !== undefined && whole.endsWith("\ufffd")) || !whole.startsWith(shown)) return "";
      const added = whole.slice(shown.length);
      shown = whole;
      return added;
    };
  }
}
