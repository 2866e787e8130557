// From logits to the next token, as `localattn generate` chooses it: softmax(logits / temperature), one draw a token.

/**
 * @param {ArrayLike<number>} logits scores of every token
 * @param {number} temperature divides them; 0 takes the largest, the lowest token among equals
 * @param {number} uniform in [0, 1)
 * @returns {number} the first token whose cumulated probability exceeds `uniform`
 */
export function choose(logits, temperature, uniform) {
  let likeliest = 0;
  for (let token = 1; token < logits.length; token++) {
    if (logits[token] > logits[likeliest] || Number.isNaN(logits[token])) likeliest = token;
  }
  const largest = logits[likeliest];
  if (!Number.isFinite(largest)) throw new RangeError("The model's logits are not finite: no token can be chosen.");
  if (temperature === 0) return likeliest;

  const cumulated = new Float64Array(logits.length);
  let sum = 0;
  for (let token = 0; token < logits.length; token++) {
    sum += Math.exp((logits[token] - largest) / temperature);
    cumulated[token] = sum;
  }
  // The weights need not sum to 1: the draw is scaled to their sum. A token of weight 0 is never picked.
  return cumulated.findIndex((reached) => reached > uniform * sum);
}
