// The model in a thread of its own: it reads a prompt, writes token by token, and stops when it is told to.
//
// Takes {kind: "open", files}, {kind: "write", run, prompt, stop, temperature, seed, count} and {kind: "stop", run}, and
// answers with "loading", "ready", "read", "token", "done" and "error". A newer `run` ends an older one.

import { Random } from "./random.js";
import { choose } from "./sampling.js";
import { Refusal, StepModel } from "./step.js";

let model;
let current = 0;
let work = Promise.resolve();
let remembered = { tokens: [], state: undefined };

onmessage = ({ data }) => {
  if (data.run) current = data.run;
  if (data.kind === "open") work = work.then(() => guarded(0, () => open(data)));
  if (data.kind === "write") work = work.then(() => guarded(data.run, () => write(data)));
};

async function guarded(run, task) {
  try {
    await task();
  } catch (error) {
    const what = error instanceof Refusal ? error.message : `The model does not run in this browser: ${error.message ?? error}`;
    postMessage({ kind: "error", run, what });
  }
}

async function open({ files }) {
  model = await StepModel.open(files, (line) => postMessage({ kind: "loading", line }));
  const { vocabulary, maxPositions, cacheBytes } = model;
  postMessage({ kind: "ready", vocabulary, maxPositions, cacheBytes });
}

async function write({ run, prompt, stop, temperature, seed, count }) {
  const stopped = () => run !== current;
  if (stopped()) return;
  const begin = performance.now();
  let logits = await read(prompt, stopped);
  const ready = performance.now();
  if (stopped()) return;
  postMessage({ kind: "read", run, seconds: (ready - begin) / 1000 });

  const random = new Random(seed);
  const limit = Math.min(count, model.room(prompt.length));
  for (let made = 1; made <= limit; made++) {
    const token = choose(logits, temperature, random.next());
    postMessage({ kind: "token", run, token, seconds: (performance.now() - ready) / 1000 });
    if (stop.includes(token)) return postMessage({ kind: "done", run, ended: true });
    if (made < limit) ({ logits } = await model.call([token]));
    await messages();
    if (stopped()) return;
  }
  postMessage({ kind: "done", run, positions: limit < count });
}

/**
 * Consume a prompt; what it has in common with the one before is not computed again.
 *
 * The state that is kept lies between calls that this prompt makes anyway, so that the logits do not depend on what
 * was typed before.
 */
async function read(prompt, stopped) {
  const known = remembered.tokens;
  const goesOn = known.length < prompt.length && known.every((token, index) => token === prompt[index]);
  model.restore(goesOn ? remembered.state : undefined);
  const largest = model.chunks[0];
  const last = Math.floor((prompt.length - 1) / largest) * largest;
  let logits;
  for (let start = model.position; start < prompt.length && !stopped(); ) {
    const call = await model.call(prompt.slice(start));
    start += call.consumed;
    logits = call.logits;
    if (start === last) remembered = { tokens: prompt.slice(0, start), state: model.save() };
    await messages();
  }
  return logits;
}

/** Let messages in that wait; timers would take milliseconds. */
function messages() {
  return new Promise((resume) => {
    const { port1, port2 } = new MessageChannel();
    port1.onmessage = () => {
      port1.close();
      resume();
    };
    port2.postMessage(null);
  });
}
