// A step file in onnxruntime-web: it takes tokens, their position and the caches, and gives logits and the next caches.
//
// The sidecar (NAME.onnx.json) says how the file is called; docs/streaming.md of localattn explains it.

const RUNTIME = new URL("./onnxruntime-web/", import.meta.url);
const ARRAYS = { float32: Float32Array, float16: globalThis.Float16Array, float64: Float64Array };

/** What keeps the page from going on, in words for the person who reads it. */
export class Refusal extends Error {}

export class StepModel {
  #ort;
  #sessions = new Map(); // by the tokens of one call
  #caches;

  /** Tokens consumed before the next call. */
  position = 0;

  /**
   * Load the step file, and the file that takes prompts in chunks where there is one.
   *
   * @param {{step: string, prefill: ?string, vocabulary: number}} files addresses of the ONNX files, relative to this
   *   module, and how many tokens there are
   * @param {(line: string) => void} report what is being loaded
   */
  static async open(files, report) {
    if (typeof WebAssembly === "undefined") {
      throw new Refusal("This browser refuses WebAssembly, which the model needs. Allow it, or try another browser.");
    }
    const model = new StepModel();
    report("Loading onnxruntime-web");
    model.#ort = await import(new URL("ort.wasm.bundle.min.mjs", RUNTIME));
    const settings = model.#ort.env.wasm;
    settings.numThreads = 1; // more need a server that sends the headers COOP and COEP
    settings.wasmPaths = { wasm: new URL("ort-wasm-simd-threaded.wasm", RUNTIME) };
    const data = new Map();
    report("Loading the model");
    model.sidecar = await model.#add(files.step, data);
    if (files.prefill) await model.#add(files.prefill, data);

    const { record } = model;
    model.vocabulary = files.vocabulary;
    model.maxPositions = record.max_positions ?? Infinity;
    model.chunks = [...model.#sessions.keys()].sort((one, other) => other - one);
    model.#caches = record.caches.map((cache) => model.#empty(cache));
    model.cacheBytes = model.#caches.reduce((sum, cache) => sum + cache.data.byteLength, 0);
    return model;
  }

  /** How the step file is called. */
  get record() {
    return this.sidecar.step;
  }

  /** How many tokens can follow a prompt of so many; the last one needs no position, because it is not consumed. */
  room(promptLength) {
    return Math.max(0, this.maxPositions - promptLength + 1);
  }

  /** Position and caches; what `restore` takes, any number of times. */
  save() {
    return { position: this.position, caches: this.#caches };
  }

  restore(saved = { position: 0, caches: this.record.caches.map((cache) => this.#empty(cache)) }) {
    this.position = saved.position;
    this.#caches = saved.caches;
  }

  /**
   * Consume tokens in one call of the file that takes the most of them.
   *
   * @param {number[]} tokens one at least
   * @returns {Promise<{consumed: number, logits: ArrayLike<number>}>} how many, and the scores of the token after them
   */
  async call(tokens) {
    const consumed = this.chunks.find((chunk) => chunk <= tokens.length);
    const { record } = this;
    const feeds = {
      [record.token_input]: this.#integers(tokens.slice(0, consumed), [1, consumed]),
      [record.position_input]: this.#integers([this.position], [1]),
    };
    record.caches.forEach((cache, index) => (feeds[cache.input] = this.#caches[index]));
    const results = await this.#sessions.get(consumed).run(feeds);
    this.#caches = record.caches.map((cache) => results[cache.output]);
    this.position += consumed;
    return { consumed, logits: results[record.logits_output].data.subarray(-this.vocabulary) };
  }

  /** Load one ONNX file, with the weights beside it; returns its sidecar. */
  async #add(path, data) {
    const address = new URL(path, import.meta.url);
    const sidecar = JSON.parse(new TextDecoder().decode(await fetched(`${address}.json`)));
    const name = sidecar.external_data;
    if (name && !data.has(name)) data.set(name, await fetched(new URL(encodeURIComponent(name), address)));
    const options = {
      executionProviders: ["wasm"],
      externalData: name ? [{ path: name, data: data.get(name) }] : [],
    };
    const session = await this.#ort.InferenceSession.create(await fetched(address), options);
    this.#sessions.set(sidecar.step.chunk, session);
    return sidecar;
  }

  #empty({ dtype, shape, fill }) {
    const size = shape.reduce((product, length) => product * length, 1);
    if (!ARRAYS[dtype]) throw new Refusal(`This browser has no arrays of ${dtype}, which the model's caches need.`);
    return new this.#ort.Tensor(dtype, new ARRAYS[dtype](size).fill(fill), shape);
  }

  #integers(values, shape) {
    return new this.#ort.Tensor("int64", BigInt64Array.from(values, BigInt), shape);
  }
}

async function fetched(address) {
  const name = decodeURIComponent(new URL(address).pathname.split("/").at(-1));
  let answer;
  try {
    answer = await fetch(address);
  } catch {
    throw new Refusal(`${name} cannot be loaded: the server does not answer, and the page has no copy of it.`);
  }
  if (!answer.ok) throw new Refusal(`${name} was not found (the server answers ${answer.status}). Copy the whole folder.`);
  return new Uint8Array(await answer.arrayBuffer());
}
