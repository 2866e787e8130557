// onnxruntime-node, or onnxruntime-web's WebAssembly in node: `node run.cjs PACKAGE FOLDER [KIND...]`.
const fs = require("fs"), path = require("path");
const { largestError } = require("./harness.cjs");
const [name, folder, ...kinds] = process.argv.slice(2);
const packages = path.resolve("node_modules");
const ort = require(path.join(packages, name));

async function open(place, file, data) {
  const options = { logSeverityLevel: 3 };
  if (name === "onnxruntime-node") return ort.InferenceSession.create(path.join(place, file), options);
  ort.env.wasm.numThreads = 1;
  options.externalData = data.map((x) => ({ path: x, data: new Uint8Array(fs.readFileSync(path.join(place, x))) }));
  return ort.InferenceSession.create(new Uint8Array(fs.readFileSync(path.join(place, file))), options);
}

(async () => {
  const results = {};
  for (const entry of fs.readdirSync(folder).sort()) {
    const place = path.join(folder, entry), described = path.join(place, "case.json");
    if (!fs.existsSync(described)) continue;
    const document = JSON.parse(fs.readFileSync(described));
    if (kinds.length && !kinds.includes(document.kind)) continue;
    const blob = new Uint8Array(fs.readFileSync(path.join(place, "arrays.bin")));
    results[document.kind] = {};
    for (const [form, file] of Object.entries(document.forms)) {
      try {
        const session = await open(place, file, document.data);
        results[document.kind][form] = { error: await largestError(ort, session, document, blob) };
      } catch (error) {
        results[document.kind][form] = { failed: String(error.message || error).slice(0, 400) };
      }
    }
  }
  const { version } = JSON.parse(fs.readFileSync(path.join(packages, name, "package.json")));
  fs.writeSync(1, JSON.stringify({ version, results }), null);
  process.exit(0);
})();
