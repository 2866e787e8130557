// What is on the page: it sends the text to the worker whenever it changes, and shows the tokens that come back.

const BYTES = 256; // a model of so many tokens reads and writes bytes; any other, numbers
const element = (id) => document.getElementById(id);
const [text, written, status] = ["text", "written", "status"].map(element);

/** What the page shows, also for programs that drive it. */
export const state = { ready: false, run: 0, writing: false, prompt: [], tokens: [], offline: false, error: "" };
let model; // vocabulary, maxPositions and cacheBytes, once it is loaded
let reader; // of text, where the model has a tokenizer
let added; // the text that a token adds
let waiting = ""; // text that came since the last frame
let framed = false; // the next frame shows it

const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
worker.onmessage = ({ data }) => (data.run === undefined || data.run === state.run) && receive[data.kind](data);
worker.onerror = (event) => fail(`The page's worker does not start: ${event.message ?? "a file is missing"}.`);

const receive = {
  loading({ line }) {
    say(`${line} …`);
  },
  ready({ kind, ...details }) {
    model = details;
    state.ready = true;
    element("cache").textContent = bytesText(model.cacheBytes);
    element("filled").parentElement.classList.toggle("endless", model.maxPositions === Infinity);
    if (model.vocabulary !== BYTES && !reader) {
      text.placeholder = `Numbers from 0 to ${model.vocabulary - 1}, such as 1, 2, 3: this page has no text for the model's tokens`;
      text.inputMode = "numeric";
    }
    say("");
    write();
  },
  read({ seconds }) {
    element("read").textContent = secondsText(seconds);
    element("prompt-length").textContent = `for ${counted(state.prompt.length)}`;
    written.textContent = "";
    written.classList.remove("stale");
    showPosition();
  },
  token({ token, seconds }) {
    state.tokens.push(token);
    state.seconds = seconds;
    if (!files.text?.stop.includes(token)) waiting += added(token);
    if (!framed) requestAnimationFrame(paint);
    framed = true;
  },
  done({ positions, ended }) {
    if (ended) say("The model ended the text.");
    if (positions) say(`The text ends here: the model has only ${model.maxPositions} positions.`);
    finish();
  },
  error({ what }) {
    fail(what);
  },
};

/** Start again from the typed text. */
function write() {
  element("typed").textContent = text.value;
  if (!model) return;
  state.run += 1;
  state.tokens = [];
  state.seconds = 0;
  state.error = "";
  waiting = "";
  added = texts();
  written.classList.add("stale");
  say("");
  if (!element("controls").checkValidity()) return refuse("Seed and tokens must be whole numbers.");
  let prompt;
  try {
    prompt = tokensOf(text.value);
  } catch (error) {
    return refuse(error.message);
  }
  state.prompt = prompt;
  if (prompt.length === 0) return refuse("");
  if (prompt.length > model.maxPositions) {
    return refuse(`The text has ${counted(prompt.length)}, but the model has only ${model.maxPositions} positions: shorten the text.`);
  }
  const settings = { temperature: Number(value("temperature")), seed: BigInt(value("seed")), count: Number(value("count")) };
  state.writing = true;
  show();
  worker.postMessage({ kind: "write", run: state.run, prompt, stop: files.text?.stop ?? [], ...settings });
}

/** End the run in progress, and keep what it has written. */
function stop() {
  state.run += 1;
  worker.postMessage({ kind: "stop", run: state.run });
  finish();
}

/** Show no continuation, and the reason. */
function refuse(why) {
  worker.postMessage({ kind: "stop", run: state.run });
  written.textContent = "";
  if (why) say(why, true);
  finish();
}

/** A function that takes one token after another, and returns the text of each; without a token, the rest. */
function texts() {
  if (reader) return reader.stream();
  if (model.vocabulary !== BYTES) return (token) => (token === undefined ? "" : `, ${token}`);
  const decoder = new TextDecoder();
  return (token) => (token === undefined ? decoder.decode() : decoder.decode(Uint8Array.of(token), { stream: true }));
}

function finish() {
  if (framed) paint();
  if (added) written.append(printable(added()));
  state.writing = false;
  show();
}

function fail(what) {
  say(what, true);
  state.error = what;
  finish();
}

function paint() {
  framed = false;
  const paper = text.parentElement;
  // Follow the end, but never take a text away from whoever types it.
  const atEnd = paper.scrollHeight - paper.scrollTop - paper.clientHeight < 40 && document.activeElement !== text;
  written.append(printable(waiting));
  waiting = "";
  if (atEnd) paper.scrollTop = paper.scrollHeight;
  const made = state.tokens.length;
  if (made > 1) element("rate").textContent = Math.round((made - 1) / state.seconds).toLocaleString("en");
  showPosition();
  show();
}

/** Update the buttons and the command below. */
function show() {
  document.body.classList.toggle("writing", state.writing);
  element("write").textContent = state.writing ? "Stop" : "Write";
  element("write").disabled = !model;
  element("keep").disabled = state.writing || written.textContent === "";
  element("shown-temperature").textContent = value("temperature") === "0" ? "0 · likeliest" : value("temperature");
  element("command").textContent =
    `localattn generate ${files?.name ?? "model_step"}.onnx --prompt-file FILE --seed ${value("seed")} ` +
    `--temperature ${value("temperature")} --max-tokens ${value("count")}${chats() ? " --chat" : ""}`;
}

function showPosition() {
  const reached = state.prompt.length + Math.max(0, state.tokens.length - 1);
  element("position").textContent = reached.toLocaleString("en");
  element("positions").textContent = model.maxPositions === Infinity ? "of any number" : `of ${model.maxPositions}`;
  element("filled").style.width = `${(100 * reached) / model.maxPositions}%`;
}

function say(line, bad = false) {
  status.textContent = line;
  status.className = bad ? "bad" : "";
}

/** The model's tokens of a text: its tokenizer's, its bytes in UTF-8, or the numbers that stand in it. */
function tokensOf(typed) {
  if (reader) return reader.tokens(typed, chats());
  if (model.vocabulary === BYTES) return [...new TextEncoder().encode(typed)];
  const words = typed.split(/[\s,]+/).filter(Boolean);
  const wrong = words.find((word) => !/^\d{1,15}$/.test(word) || Number(word) >= model.vocabulary);
  if (wrong !== undefined) throw new RangeError(`${wrong} is not a token: tokens are numbers from 0 to ${model.vocabulary - 1}.`);
  return words.map(Number);
}

const chats = () => Boolean(reader?.chats && element("chat").checked);
const value = (id) => element(id).value.trim();
const counted = (number) => `${number.toLocaleString("en")} token${number === 1 ? "" : "s"}`;
const printable = (piece) => piece.replace(/[\x00-\x08\x0b-\x1f\x7f-\x9f]/g, "\ufffd");
const secondsText = (seconds) => (seconds < 1 ? `${Math.ceil(1000 * seconds)} ms` : `${seconds.toFixed(1)} s`);

function bytesText(size) {
  const unit = size < 1e6 ? ["kB", 1e3] : ["MB", 1e6];
  return `${(size / unit[1]).toLocaleString("en", { maximumFractionDigits: size < 1e7 ? 1 : 0 })} ${unit[0]}`;
}

text.addEventListener("input", write);
for (const id of ["temperature", "seed", "count", "chat"]) element(id).addEventListener("input", write);
element("controls").addEventListener("submit", (event) => {
  event.preventDefault();
  state.writing ? stop() : write();
});
element("another").addEventListener("click", () => {
  if (!element("seed").checkValidity()) return;
  element("seed").value = String(BigInt(value("seed")) + 1n);
  write();
});
element("keep").addEventListener("click", () => {
  text.value += written.textContent;
  text.focus();
  write();
});

// An address can bring a text and settings along: #text=def%20&seed=3&temperature=0.5&count=200
for (const [id, brought] of new URLSearchParams(location.hash.slice(1))) {
  if (["text", "temperature", "seed", "count"].includes(id)) element(id).value = brought;
}

let files; // page.json: the addresses of the model's files

async function begin() {
  try {
    files = await (await fetch(new URL("page.json", import.meta.url), { cache: "reload" })).json();
  } catch {
    return fail("page.json is missing or damaged, so the page does not know its model. Copy the whole folder.");
  }
  element("name").textContent = files.name;
  document.title = `${files.name} · localattn`;
  write();
  show();
  if (files.text) {
    try {
      const { Text } = await import(new URL("text/text.js", import.meta.url));
      reader = await Text.open(files.text, import.meta.url);
    } catch (error) {
      return fail(`The model's tokenizer cannot be read: ${error.message}`);
    }
    element("chats").hidden = !reader.chats;
  }
  worker.postMessage({ kind: "open", files });
  keepCopy().catch(() => {}); // the page works without a copy, and does not say that it has one
}

/** Keep a copy of everything; browsers allow it on `localhost` and over https. */
async function keepCopy() {
  if (!navigator.serviceWorker) return;
  const address = new URL(`service-worker.js?bundle=${files.digest}`, import.meta.url);
  const { installing, waiting, active } = await navigator.serviceWorker.register(address);
  await activated(installing ?? waiting ?? active);
  state.offline = true;
  element("offline").textContent = "The page works offline now.";
}

/** Wait until a service worker answers for the page; fails if it is given up. */
function activated(worker) {
  return new Promise((resolve, reject) => {
    const look = () => {
      if (worker.state === "activated") resolve();
      if (worker.state === "redundant") reject(new Error("The copy could not be made."));
    };
    worker.addEventListener("statechange", look);
    look();
  });
}

begin();
