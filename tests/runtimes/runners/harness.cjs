// What the runners in JavaScript share, in node and in a browser: run one form of a case, call by call.
const VIEWS = {
  int64: BigInt64Array, int32: Int32Array, float32: Float32Array, bool: Uint8Array, uint8: Uint8Array, int8: Int8Array,
  float16: Uint16Array,
};

// The numbers of a fp16 array by their bits; a runtime may give them as a Float16Array too.
function numbers(data, dtype) {
  if (dtype !== "float16" || (typeof Float16Array !== "undefined" && data instanceof Float16Array)) {
    return Array.from(data, Number);
  }
  return Array.from(data, (bits) => {
    const sign = bits & 0x8000 ? -1 : 1, exponent = (bits >> 10) & 31, fraction = bits & 1023;
    if (exponent === 0) return sign * fraction * 2 ** -24;
    if (exponent === 31) return fraction ? NaN : sign * Infinity;
    return sign * (1 + fraction / 1024) * 2 ** (exponent - 15);
  });
}

async function largestError(ort, session, document, blob) {
  const view = (spec) => new VIEWS[spec.dtype](blob.slice(spec.offset, spec.offset + spec.bytes).buffer);
  const tensor = (spec) => new ort.Tensor(spec.dtype, view(spec), spec.shape);
  const all = (named) => Object.fromEntries(Object.entries(named).map(([name, spec]) => [name, tensor(spec)]));
  let state = all(document.start), worst = 0;
  for (const call of document.calls) {
    const outputs = await session.run({ ...all(call.inputs), ...state });
    for (const [name, spec] of Object.entries(call.outputs)) {
      const wanted = numbers(view(spec), spec.dtype), got = numbers(outputs[name].data, spec.dtype);
      if (String(outputs[name].dims) !== String(spec.shape)) throw new Error(`${name} has shape ${outputs[name].dims}`);
      wanted.forEach((value, place) => {
        const difference = Math.abs(got[place] - value);
        worst = Math.max(worst, Number.isFinite(difference) ? difference : Infinity);
      });
    }
    state = Object.fromEntries(Object.entries(document.carried).map(([name, kept]) => [kept, outputs[name]]));
  }
  return worst;
}

if (typeof module !== "undefined") module.exports = { largestError };
