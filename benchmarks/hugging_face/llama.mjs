// Generate with llama.cpp, by node-llama-cpp: node llama.mjs PACKAGE MODEL ROOM THREADS TOKENS, the prompt on stdin.
// Prints seconds of the prompt and of each token, the tokens, and the most bytes that were resident.

import { readFileSync } from "node:fs";
import { performance } from "node:perf_hooks";
import { pathToFileURL } from "node:url";

const started = performance.now();
const [folder, modelPath, room, threads, count] = process.argv.slice(2);
const { getLlama, LlamaLogLevel } = await import(pathToFileURL(folder + "/dist/index.js"));
const llama = await getLlama({ gpu: false, build: "never", logLevel: LlamaLogLevel.error, maxThreads: Number(threads) });
const model = await llama.loadModel({ modelPath });
const context = await model.createContext({
    contextSize: Number(room), batchSize: 512, threads: { ideal: Number(threads), min: Number(threads) }
});
const opened = (performance.now() - started) / 1e3;
const prompt = JSON.parse(readFileSync(0, "utf8"));
const seconds = [], cpu = [], tokens = [];
const used = () => { const { user, system } = process.cpuUsage(); return (user + system) / 1e6; };
let began = performance.now(), before = used();
for await (const token of context.getSequence().evaluate(prompt, { temperature: 0, yieldEogToken: true })) {
    seconds.push((performance.now() - began) / 1e3);
    cpu.push(used() - before);
    tokens.push(token);
    if (tokens.length > Number(count)) break;
    began = performance.now();
    before = used();
}
console.log(JSON.stringify({ opened, seconds, cpu, tokens, peak_bytes: process.resourceUsage().maxRSS * 1024 }));
process.exit(0);
