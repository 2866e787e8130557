// The random numbers of `localattn generate`: numpy's SeedSequence and PCG64, number for number.
//
// Sources: O'Neill, "PCG: A Family of Simple Fast Space-Efficient Statistically Good Algorithms for Random Number
// Generation" (2014), the generator pcg64 (XSL-RR); numpy/random/bit_generator.pyx for the seeding. numpy keeps the
// streams of its bit generators as they are (NEP 19).

const WORD = 0xffffffffn;
const STATE = (1n << 128n) - 1n;
const MULTIPLIER = (2549297995355413924n << 64n) | 4865540595714422341n;
const POOL = 4; // words of 32 bits in which a seed is mixed

/** Uniform numbers in [0, 1) from a seed: those of the first row of a batch. */
export class Random {
  #state;
  #increment;

  /** @param {bigint} seed not negative */
  constructor(seed) {
    const [stateHigh, stateLow, streamHigh, streamLow] = seedWords(seed);
    this.#increment = ((((streamHigh << 64n) | streamLow) << 1n) | 1n) & STATE;
    this.#state = 0n;
    this.#advance();
    this.#state = (this.#state + ((stateHigh << 64n) | stateLow)) & STATE;
    this.#advance();
  }

  /** The next number: the upper 53 bits of the next 64, as a fraction. */
  next() {
    this.#advance();
    const folded = BigInt.asUintN(64, (this.#state >> 64n) ^ this.#state);
    const turn = this.#state >> 122n;
    const bits = BigInt.asUintN(64, (folded >> turn) | (folded << ((64n - turn) & 63n)));
    return Number(bits >> 11n) / 2 ** 53;
  }

  #advance() {
    this.#state = (this.#state * MULTIPLIER + this.#increment) & STATE;
  }
}

/** Four words of 64 bits from `SeedSequence(seed, spawn_key=(0,))`: each row has a key, and the first one 0. */
function seedWords(seed) {
  const entropy = [];
  for (let rest = seed; rest > 0n; rest >>= 32n) entropy.push(Number(rest & WORD));
  while (entropy.length < POOL) entropy.push(0);
  entropy.push(0);

  const mixed = hasher(0x43b0d7e5, 0x931e8875);
  const pool = entropy.slice(0, POOL).map(mixed);
  for (let source = 0; source < POOL; source++) {
    for (let target = 0; target < POOL; target++) {
      if (target !== source) pool[target] = merged(pool[target], mixed(pool[source]));
    }
  }
  for (const word of entropy.slice(POOL)) {
    for (let target = 0; target < POOL; target++) pool[target] = merged(pool[target], mixed(word));
  }

  const drawn = hasher(0x8b51f9dd, 0x58f38ded);
  const halves = Array.from({ length: 2 * POOL }, (_, index) => BigInt(drawn(pool[index % POOL])));
  return Array.from({ length: POOL }, (_, index) => halves[2 * index] | (halves[2 * index + 1] << 32n));
}

/** A function that hashes one word after another, with a constant that changes from call to call. */
function hasher(start, multiplier) {
  let constant = start;
  return (word) => {
    const before = constant;
    constant = Math.imul(constant, multiplier);
    const value = Math.imul(word ^ before, constant);
    return (value ^ (value >>> 16)) >>> 0;
  };
}

function merged(first, second) {
  const value = Math.imul(0xca01f9dd, first) - Math.imul(0x4973f715, second);
  return ((value | 0) ^ ((value | 0) >>> 16)) >>> 0;
}
