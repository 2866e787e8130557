// Attention to a ring of keys and values. Included once per instruction set, inside its namespace, after tiles.inl,
// whose tiles of queries a chunk uses.
//
// A step has one query a head. Its ring is taken in pieces, which threads share; every piece has sums of its own, which
// are merged in the end. A group of heads reads every key and value once: the products of kLanes keys are added up
// together, and stay in the first cache for the next head.
//
// A chunk takes tiles of queries. Which keys a tile sees follows from its biases: runs of slots that one of its
// queries sees. Blocks of keys that no tile sees are not even copied.

// Biases of hidden keys lie below, all others above: OUTSIDE_SCORE is -2e30, LOWEST_BIAS -1e30.
constexpr float kSeen = -1.5e30f;

constexpr int64_t kValueFloats = 4096;   // of values that all heads of a group take before the next
constexpr int64_t kAheadNumbers = 8192;  // numbers: how far ahead of a long row memory is asked for
constexpr int64_t kMergedVectors = 4;    // of channels, whose sums over the pieces are in registers

// Keys [from, to) of those attended to.
struct Run {
  int64_t from, to;
};

// A row of queries: in units of log 2, or of the cap; zeros up to a multiple of kLanes.
template <typename Number>
inline void scaled_query(const Ring& call, const Number* query, float* to) {
  const float factor = query_factor(call);
  for (int64_t c = 0; c < call.dim; c += kLanes)
    store(to + c, load_some(query + c, least(kLanes, call.dim - c)) * factor);
}

constexpr int kKeys = kLanes < 8 ? kLanes : 8;  // whose sums are in registers, and whose addresses

// Prefetches what lies kAheadNumbers further: the hardware prefetcher does not follow several rows at once.
template <bool kAsks, typename Number>
inline Vector load_and_ask(const Number* from) {
  if constexpr (kAsks) __builtin_prefetch(from + kAheadNumbers, 0, 2);
  return load_elements(from);
}

// The products of a query with kKeys keys; lane l is part of that with key l % kKeys.
template <bool kAsks, typename Number>
inline Vector multiply_keys(const float* query, const Number* keys, int64_t dim) {
  Vector sums[kKeys] = {};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    const Vector x = load(query + c);
    LOCALATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) sums[j] += x * load_and_ask<kAsks>(keys + j * dim + c);
  }
  if (c < dim) {
    const Vector x = load(query + c);
    LOCALATTN_UNROLL
    for (int j = 0; j < kKeys; ++j) sums[j] += x * load_some(keys + j * dim + c, dim - c);
  }
  return fold_lanes<kKeys>(sums);
}

// The products of a query with kLanes keys.
template <bool kAsks, typename Number>
inline Vector multiply_lanes(const float* query, const Number* keys, int64_t dim) {
  if constexpr (kLanes == kKeys) {
    return multiply_keys<kAsks>(query, keys, dim);
  } else {
    return fold_pair<kKeys>(multiply_keys<kAsks>(query, keys, dim),
                            multiply_keys<kAsks>(query, keys + kKeys * dim, dim));
  }
}

// The product with one key, which may have a scale; its lanes are still to be added up.
template <typename Number>
inline Vector multiply_key(const float* query, const Number* key, const float* scale, int64_t dim) {
  Vector sum = {};
  for (int64_t c = 0; c < dim; c += kLanes) {
    const int64_t some = least(kLanes, dim - c);
    const Vector x = load_some(key + c, some);
    sum += load(query + c) * (scale ? x * load_some(scale + c, some) : x);
  }
  return sum;
}

// Scores, capped where there is a cap, become those of the softmax: in units of log 2, with their biases.
inline Vector biased(const Ring& call, Vector scores, Vector bias) {
  if (call.softcap > 0) scores = relative_tanh_of(scores) * (call.softcap * kLog2e);
  return scores + bias * kLog2e;
}

// Scores [0, count) become weights, of which none is above 1. Returns their sum; `top` is the largest score.
inline float weigh_scores(float* scores, int64_t count, float& top) {
  for (int64_t k = count; k < align(count, kLanes); ++k) scores[k] = kBelowScores;
  Vector tops = splat(kBelowScores);
  for (int64_t k = 0; k < count; k += kLanes) tops = larger(tops, load(scores + k));
  top = tops[0];
  for (int lane = 1; lane < kLanes; ++lane) top = tops[lane] > top ? tops[lane] : top;
  Vector totals = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    const Vector weights = exp2_of(load(scores + k) - top);
    store(scores + k, weights);
    totals += weights;
  }
  return add_up(totals);
}

// kCount vectors of channels: the sums, and weight · value of `count` keys.
template <int kCount, bool kAsks, typename Number>
inline void add_vectors(const Number* value, int64_t dim, const float* weights, int64_t count, float* sums) {
  Vector even[kCount], odd[kCount] = {};
  LOCALATTN_UNROLL
  for (int c = 0; c < kCount; ++c) even[c] = load(sums + c * kLanes);
  int64_t k = 0;
  for (; k + 2 <= count; k += 2, value += 2 * dim) {
    LOCALATTN_UNROLL
    for (int c = 0; c < kCount; ++c) {
      even[c] += load_and_ask<kAsks>(value + c * kLanes) * weights[k];
      odd[c] += load_and_ask<kAsks>(value + dim + c * kLanes) * weights[k + 1];
    }
  }
  if (k < count) {
    for (int c = 0; c < kCount; ++c) even[c] += load_elements(value + c * kLanes) * weights[k];
  }
  LOCALATTN_UNROLL
  for (int c = 0; c < kCount; ++c) store(sums + c * kLanes, even[c] + odd[c]);
}

// All channels of a row.
template <bool kAsks, typename Number>
inline void add_values(const Number* values, int64_t dim, const float* weights, int64_t count, float* sums) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= dim; c += 4 * kLanes) add_vectors<4, kAsks>(values + c, dim, weights, count, sums + c);
  for (; c + kLanes <= dim; c += kLanes) add_vectors<1, kAsks>(values + c, dim, weights, count, sums + c);
  if (c == dim) return;
  Vector sum = load(sums + c);
  for (int64_t k = 0; k < count; ++k) sum += load_some(values + k * dim + c, dim - c) * weights[k];
  store(sums + c, sum);
}

// Appends keys [from, to) to the runs.
inline void add_run(Run* runs, int64_t& count, int64_t from, int64_t to) {
  if (count == 0 || runs[count - 1].to != from) runs[count++] = {from, from};
  runs[count - 1].to = to;
}

// The runs of keys for which `sees` says so.
template <typename Sees>
inline int64_t find_runs(int64_t keys, Run* runs, Sees sees) {
  int64_t count = 0;
  for (int64_t k = 0; k < keys; ++k) {
    if (sees(k)) add_run(runs, count, k, k + 1);
  }
  return count;
}

// The runs of keys [first, end) that a row of biases shows.
inline int64_t find_seen(const float* bias, int64_t first, int64_t end, Run* runs) {
  constexpr int64_t kSome = 4 * kLanes;
  int64_t count = 0;
  for (int64_t k = first; k < end; k += kSome) {
    const int64_t to = least(k + kSome, end);
    float hidden = 1;  // or all, or none
    if (to - k == kSome) {
      Vector sum = {};
      LOCALATTN_UNROLL
      for (int v = 0; v < 4; ++v) sum += load_elements(bias + k + v * kLanes) > kSeen ? Vector{} : splat(1);
      hidden = add_up(sum);
    }
    if (hidden == 0) {
      add_run(runs, count, k, to);
    } else if (hidden < kSome) {
      for (int64_t i = k; i < to; ++i) {
        if (bias[i] > kSeen) add_run(runs, count, i, i + 1);
      }
    }
  }
  return count;
}

// What a step's task keeps while it attends to a piece of a ring.
struct StepMemory {
  int64_t stride;  // of a query's scores
  Run* runs;
  float* queries;  // [group][width]
  float* scores;   // [group][stride]
  float* sums;     // [group][row_floats()]; not used where the pieces have their own

  static int64_t runs_floats(int64_t slots) { return align((slots / 2 + 1) * 4, kMostLanes); }
  static int64_t stride_of(int64_t slots) { return align(slots, kMostLanes) + kMostLanes; }
  static int64_t floats(const Ring& call, const RingPieces& pieces) {
    const int64_t a_query = pieces.width() + stride_of(pieces.slots) + pieces.row_floats();
    return runs_floats(pieces.slots) + call.group() * a_query;
  }
  StepMemory(const Ring& call, const RingPieces& pieces, float* memory)
      : stride(stride_of(pieces.slots)), runs(reinterpret_cast<Run*>(memory)) {
    queries = memory + runs_floats(pieces.slots);
    scores = queries + call.group() * pieces.width();
    sums = scores + call.group() * stride;
  }
};

// Slots [first, end) of the next ring: those of the one before, and the new row where it lies among them.
template <typename Number>
inline void write_slots(const Ring& call, int64_t at, int64_t first, int64_t end) {
  const int64_t slot = call.write_index[at * 3 + 2], from = (at * call.slots + first) * call.dim;
  const auto write = [&](const void* cache, const void* given, void* next) {
    Number* ring = static_cast<Number*>(next) + from;
    if (cache != next) {
      const size_t size = static_cast<size_t>((end - first) * call.dim) * sizeof(Number);
      std::memcpy(ring, static_cast<const Number*>(cache) + from, size);
    }
    if (slot < first || slot >= end) return;
    std::memcpy(ring + (slot - first) * call.dim, static_cast<const Number*>(given) + at * call.dim,
                static_cast<size_t>(call.dim) * sizeof(Number));
  };
  write(call.key_cache, call.key, call.next_key);
  write(call.value_cache, call.value, call.next_value);
}

// Whether rows are so long and so many that prefetching helps.
template <typename Number>
inline bool asks_ahead(const Ring& call) {
  constexpr int64_t kLongRow = 512, kManyBytes = int64_t{1} << 20;
  const int64_t row = call.dim * static_cast<int64_t>(sizeof(Number));
  return row >= kLongRow && 2 * call.batch * call.kv_heads * call.slots * row > kManyBytes;
}

// Scores of up to kLanes keys from `key` on, for `count` queries: the keys are read from memory once.
template <typename Number>
inline void score_keys(const Ring& call, const Number* keys, int64_t key, int64_t some, const float* bias,
                       const StepMemory& memory, int64_t count, int64_t found) {
  const bool asks = asks_ahead<Number>(call);
  for (int64_t i = 0; i < count; ++i) {
    const float* query = memory.queries + i * align(call.dim, kMostLanes);
    Vector products;
    if (some == kLanes && !call.key_scale) {
      const Number* from = keys + key * call.dim;
      products =
          asks && i == 0 ? multiply_lanes<true>(query, from, call.dim) : multiply_lanes<false>(query, from, call.dim);
    } else {
      Vector parts[kLanes];
      for (int64_t j = 0; j < kLanes; ++j) {
        const int64_t at = key + least(j, some - 1);
        const float* scale = call.key_scale ? call.key_scale + at * call.dim : nullptr;
        parts[j] = multiply_key(query, keys + at * call.dim, scale, call.dim);
      }
      products = fold_lanes<kLanes>(parts);
    }
    const Vector biases = some == kLanes ? load_elements(bias + key) : load_some(bias + key, some);
    // There is room for a vector behind the last.
    store_elements(memory.scores + i * memory.stride + found, biased(call, products, biases));
  }
}

// Query heads [head, head + count) of a group, which share their biases, against the runs of keys that they see. A row
// of `sums` for each, `stride` floats apart.
template <typename Number>
inline void step_heads(const Ring& call, int64_t sequence, int64_t head, int64_t count, int64_t runs,
                       const StepMemory& memory, float* sums, int64_t stride) {
  const int64_t ring = (sequence * call.kv_heads + head / call.group()) * call.slots * call.dim;
  const Number* keys = static_cast<const Number*>(call.next_key) + ring;
  const Number* values = static_cast<const Number*>(call.next_value) + ring;
  const Number* queries = static_cast<const Number*>(call.query) + (sequence * call.heads + head) * call.dim;
  const float* bias = call.bias + call.bias_of(sequence, head) * call.slots;
  const int64_t width = align(call.dim, kMostLanes);
  for (int64_t i = 0; i < count; ++i) scaled_query(call, queries + i * call.dim, memory.queries + i * width);
  int64_t found = 0;
  for (int64_t r = 0; r < runs; ++r) {
    for (int64_t k = memory.runs[r].from; k < memory.runs[r].to; k += kLanes) {
      const int64_t some = least(kLanes, memory.runs[r].to - k);
      score_keys(call, keys, k, some, bias, memory, count, found);
      found += some;
    }
  }
  for (int64_t i = 0; i < count; ++i) {
    float* row = sums + i * stride;
    std::memset(row, 0, static_cast<size_t>(width) * sizeof(float));
    row[width + 1] = weigh_scores(memory.scores + i * memory.stride, found, row[width]);
  }
  const float* weights = memory.scores;
  const bool asks = asks_ahead<Number>(call);
  const int64_t at_once = most(kValueFloats / call.dim / 2 * 2, 2);
  for (int64_t r = 0; r < runs; ++r) {
    for (int64_t k = memory.runs[r].from; k < memory.runs[r].to; k += at_once) {
      const int64_t some = least(at_once, memory.runs[r].to - k);
      for (int64_t i = 0; i < count; ++i) {
        const auto add = asks && i == 0 ? add_values<true, Number> : add_values<false, Number>;
        add(values + k * call.dim, call.dim, weights + i * memory.stride, some, sums + i * stride);
      }
      weights += some;
    }
  }
}

// The pieces' rows of a head become its output; they are added up in their order. False if none saw a key.
template <typename Number>
inline bool merge_rows(const Ring& call, int64_t head, const RingPieces& pieces, float* rows, Number* output) {
  const int64_t width = pieces.width(), row_floats = pieces.row_floats();
  const auto top_of = [&](int64_t i) -> float& { return rows[i * row_floats + width]; };
  const auto total_of = [&](int64_t i) -> float { return rows[i * row_floats + width + 1]; };
  const float* sink = call.sinks ? call.sinks + head : nullptr;
  bool seen = sink != nullptr;
  float top = sink ? *sink * kLog2e : kBelowScores;
  for (int64_t i = 0; i < pieces.count; ++i) {
    if (total_of(i) == 0.0f) continue;
    seen = true;
    top = top_of(i) > top ? top_of(i) : top;
  }
  if (!seen) return false;
  float total = sink ? exp2_of(splat(*sink * kLog2e - top))[0] : 0.0f;
  for (int64_t i = 0; i < pieces.count; ++i) {
    // From here on a piece's share, in the place of its top.
    top_of(i) = total_of(i) == 0.0f ? 0.0f : exp2_of(splat(top_of(i) - top))[0];
    total += total_of(i) * top_of(i);
  }
  const float factor = 1.0f / total;
  for (int64_t c = 0; c < call.dim; c += kMergedVectors * kLanes) {
    const int64_t vectors = least(kMergedVectors, divide_up(call.dim - c, kLanes));
    Vector sums[kMergedVectors] = {};
    for (int64_t i = 0; i < pieces.count; ++i) {
      const float share = top_of(i);
      if (share == 0.0f) continue;  // what nothing was written to, too
      for (int64_t v = 0; v < vectors; ++v) sums[v] += load(rows + i * row_floats + c + v * kLanes) * share;
    }
    for (int64_t v = 0; v < vectors; ++v) {
      const int64_t at = c + v * kLanes;
      store_some(output + at, sums[v] * factor, least(kLanes, call.dim - at));
    }
  }
  return true;
}

// The heads of one group against one piece of their ring. A row of sums for each, `stride` floats apart: those of a
// piece without a key that is seen have a total of 0 and nothing else, unless `all` keys count.
template <typename Number>
inline void attend_piece(const Ring& call, const RingPieces& pieces, int64_t at, int64_t piece, bool all,
                         const StepMemory& memory, float* sums, int64_t stride) {
  const int64_t sequence = at / call.kv_heads, group = at % call.kv_heads * call.group();
  const int64_t first = piece * pieces.slots, end = least(first + pieces.slots, call.slots);
  const int64_t together = call.bias_by_head ? 1 : call.group();
  for (int64_t i = 0; i < call.group(); i += together) {
    const float* bias = call.bias + call.bias_of(sequence, group + i) * call.slots;
    memory.runs[0] = {first, end};
    const int64_t runs = all ? 1 : find_seen(bias, first, end, memory.runs);
    if (runs == 0) {
      for (int64_t j = i; j < i + together; ++j) sums[j * stride + pieces.width() + 1] = 0;
    } else {
      step_heads<Number>(call, sequence, group + i, together, runs, memory, sums + i * stride, stride);
    }
  }
}

// The outputs of a group, of the rows of all its pieces: [group][pieces][row_floats()].
template <typename Number>
inline void finish_group(const Ring& call, const RingPieces& pieces, int64_t at, const StepMemory& memory,
                         float* rows) {
  const int64_t row_floats = pieces.row_floats(), stride = pieces.count * row_floats;
  for (int64_t i = 0; i < call.group(); ++i) {
    const int64_t head = at % call.kv_heads * call.group() + i;
    Number* output = static_cast<Number*>(call.output) + (at / call.kv_heads * call.heads + head) * call.dim;
    if (merge_rows(call, head, pieces, rows + i * stride, output)) continue;
    // A query that sees no key gets the mean of all.
    for (int64_t piece = 0; piece < pieces.count; ++piece) {
      attend_piece<Number>(call, pieces, at, piece, true, memory, rows + piece * row_floats, stride);
    }
    merge_rows(call, head, pieces, rows + i * stride, output);
  }
}

template <typename Number>
bool ring_step_by(const Ring& call, const RingPieces& pieces, Range parts) {
  const Scratch scratch(static_cast<size_t>(StepMemory::floats(call, pieces)));
  if (!scratch.data()) return false;
  const StepMemory memory(call, pieces, scratch.data());
  const int64_t row_floats = pieces.row_floats();
  for (int64_t part = parts.first; part < parts.end; ++part) {
    const int64_t at = part / pieces.count, piece = part % pieces.count, first = piece * pieces.slots;
    write_slots<Number>(call, at, first, least(first + pieces.slots, call.slots));
    if (pieces.count == 1) {
      attend_piece<Number>(call, pieces, at, 0, false, memory, memory.sums, row_floats);
      finish_group<Number>(call, pieces, at, memory, memory.sums);
    } else {
      float* sums = pieces.data + at * call.group() * pieces.count * row_floats + piece * row_floats;
      attend_piece<Number>(call, pieces, at, piece, false, memory, sums, pieces.count * row_floats);
    }
  }
  return true;
}

// Pieces [first, end) of the rings of all heads of keys, in the order of sequences, heads and slots.
bool ring_step(const Ring& call, const RingPieces& pieces, Range parts) {
  return (call.element == Element::fp32 ? ring_step_by<float> : ring_step_by<uint16_t>)(call, pieces, parts);
}

template <typename Number>
bool ring_merge_by(const Ring& call, const RingPieces& pieces, Range heads) {
  const Scratch scratch(static_cast<size_t>(StepMemory::floats(call, pieces)));
  if (!scratch.data()) return false;
  const StepMemory memory(call, pieces, scratch.data());
  for (int64_t at = heads.first; at < heads.end; ++at) {
    float* rows = pieces.data + at * call.group() * pieces.count * pieces.row_floats();
    finish_group<Number>(call, pieces, at, memory, rows);
  }
  return true;
}

// The outputs of heads of keys [first, end), after all of their pieces, where there are several.
bool ring_merge(const Ring& call, const RingPieces& pieces, Range heads) {
  return (call.element == Element::fp32 ? ring_merge_by<float> : ring_merge_by<uint16_t>)(call, pieces, heads);
}

constexpr int64_t kRingRows = kWide * kLanes;  // queries of a chunk's tile

// kLanes rows of a tile's biases at keys [k, k + some).
inline void load_biases(const Ring& call, const float* from, int64_t first, int64_t k, int64_t some, Vector* square) {
  const int64_t keys = call.keys();
  for (int64_t i = 0; i < kLanes; ++i) {
    const float* row = from + least(first + i, call.rows - 1) * keys + k;
    square[i] = some == kLanes ? load_elements(row) : load_some(row, some);
  }
}

// Where a bias hides nothing; NaN does not.
inline Integers shown(Vector bias) { return ~(bias <= splat(kSeen)); }

// Which keys [k, k + some) a query of the tile sees, as bytes; returns whether there is one.
inline bool mark_seen(const Ring& call, const float* from, int64_t first, int64_t k, int64_t some, uint8_t* seen) {
  Integers any{};
  for (int v = 0; v < kWide; ++v) {
    Vector square[kLanes];
    load_biases(call, from, first + v * kLanes, k, some, square);
    for (const Vector& row : square) any |= shown(row);
  }
  bool found = false;
  for (int64_t i = 0; i < some; ++i) {
    seen[k + i] = any[i] != 0;
    found |= any[i] != 0;
  }
  return found;
}

// Keys [k, k + some) of a tile, transposed, in units of log 2; adds to what each query sees.
inline void turn_biases(const Ring& call, const float* from, int64_t first, int64_t k, int64_t some, float* to,
                        Integers* sees) {
  for (int v = 0; v < kWide; ++v) {
    Vector square[kLanes];
    load_biases(call, from, first + v * kLanes, k, some, square);
    transpose(square);
    for (int64_t i = 0; i < some; ++i) {
      sees[v] |= shown(square[i]);
      store(to + ((k + i) * kWide + v) * kLanes, square[i] * kLog2e);
    }
  }
}

// Tiles [first, end) of the biases of a chunk, transposed where one of its queries sees a key: a long ring is mostly
// hidden. Lanes past the last row repeat it. A query that sees no key at all gets the mean of all, as everywhere.
void ring_biases(const Ring& call, const RingBiases& biases, Range tiles) {
  const int64_t keys = call.keys();
  for (int64_t at = tiles.first; at < tiles.end; ++at) {
    const int64_t first = at % biases.tiles * kRingRows;
    const float* from = call.bias + at / biases.tiles * call.rows * keys;
    float* to = biases.data + at * keys * kRingRows;
    uint8_t* seen = biases.seen + at * keys;
    Integers sees[kWide] = {};
    for (int64_t k = 0; k < keys; k += kLanes) {
      const int64_t some = least(kLanes, keys - k);
      if (mark_seen(call, from, first, k, some, seen)) turn_biases(call, from, first, k, some, to, sees);
    }
    bool blind = false;
    for (const Integers& lanes : sees) {
      for (int lane = 0; lane < kLanes; ++lane) blind |= lanes[lane] == 0;
    }
    if (!blind) continue;
    for (int64_t k = 0; k < keys; k += kLanes) {
      turn_biases(call, from, first, k, least(kLanes, keys - k), to, sees);
    }
    std::memset(seen, 1, static_cast<size_t>(keys));
  }
}

// What a chunk's tile keeps between blocks of keys.
struct RingTile {
  float* query;  // [dim][kRingRows]
  float* sums;   // [kRingRows][width]
  float* top;
  float* total;
};

// How a chunk's scratch memory is divided; sizes in floats.
struct RingPlan {
  int64_t width, panels, block_rows, panel, tile;

  RingPlan(const Ring& call, int64_t tiles) : count(tiles) {
    width = align(call.dim, 16);
    panels = divide_up(call.dim, kDepth);
    block_rows = least(most(kBlockFloats / (panels * kDepth + width) / kStep * kStep, kStep), align(call.keys(), 16));
    panel = (block_rows + kPadding) * kDepth;
    tile = kRingRows * (align(call.dim, kLanes) + width + 2);
  }
  int64_t scores() const { return (kStep + kPadding) * kRingRows; }
  int64_t values() const { return block_rows * width; }
  int64_t runs() const { return align((block_rows / 2 + 1) * 4, 16); }
  int64_t floats() const { return scores() + panels * panel + values() + runs() + count * tile; }

 private:
  int64_t count;
};

// Key and value of one key of a chunk: of the ring, or of the new tokens.
template <typename Number>
inline const Number* ring_row(const Ring& call, const void* ring, const void* given, int64_t at, int64_t key) {
  if (key < call.slots) return static_cast<const Number*>(ring) + (at * call.slots + key) * call.dim;
  return static_cast<const Number*>(given) + (at * call.rows + key - call.slots) * call.dim;
}

// Queries of a tile, transposed and scaled, and nothing seen so far.
template <typename Number>
inline void begin_ring_tile(const Ring& call, int64_t sequence, int64_t head, int64_t first, const RingTile& tile,
                            int64_t width) {
  const Number* queries =
      static_cast<const Number*>(call.query) + (sequence * call.heads + head) * call.rows * call.dim;
  const float factor = query_factor(call);
  for (int64_t c = 0; c < call.dim; c += kLanes) {
    const int64_t some = least(kLanes, call.dim - c);
    for (int v = 0; v < kWide; ++v) {
      Vector square[kLanes];
      for (int64_t i = 0; i < kLanes; ++i) {
        const int64_t row = least(first + v * kLanes + i, call.rows - 1);
        square[i] = load_some(queries + row * call.dim + c, some);
        if (call.query_scale) square[i] *= load_some(call.query_scale + row * call.dim + c, some);
      }
      transpose(square);
      for (int i = 0; i < kLanes; ++i) store(tile.query + ((c + i) * kWide + v) * kLanes, square[i] * factor);
    }
  }
  std::memset(tile.sums, 0, static_cast<size_t>(kRingRows * width) * sizeof(float));
  const float sink = call.sinks ? call.sinks[head] * kLog2e : kBelowScores;
  for (int64_t i = 0; i < kRingRows; ++i) {
    tile.top[i] = sink < kBelowScores ? kBelowScores : sink;
    tile.total[i] = call.sinks ? 1.0f : 0.0f;
  }
}

// A tile attends to a run of a block's keys; `bias` is that of the block's first.
inline void attend_run(const Ring& call, const Block& block, Run run, const RingTile& tile, const float* bias,
                       float* scores) {
  alignas(64) float shrink[kRingRows];
  for (int64_t at = run.from; at < run.to; at += kStep) {
    const int64_t count = least(kStep, run.to - at);
    for (int64_t key = 0; key < count; key += kGroup) {
      score_group<kWide, kWide, kGroup>(block, at + key, tile.query, call.dim, scores + key * kRingRows);
    }
    if (call.softcap > 0) {
      for (int v = 0; v < kWide; ++v) cap_scores<kWide>(call.softcap, scores + v * kLanes, count);
    }
    const float* biases = bias + at * kRingRows;
    for (int64_t i = 0; i < count * kRingRows; i += kLanes) store(scores + i, load(scores + i) + load(biases + i));
    for (int v = 0; v < kWide; ++v) {
      const int64_t lane = v * kLanes;
      soften<kWide>(scores + lane, count, tile.top + lane, tile.total + lane, shrink + lane);
    }
    for (int64_t r = 0; r < kRingRows; r += kValueRows) {
      const Sums to{tile.sums + r * block.width, block.width, shrink + r};
      weigh_rows<kRingRows, kValueVectors>(block.values + at * block.width, block.width, scores + r, count, to,
                                           align(call.dim, kLanes));
    }
  }
}

// Keys [first, first + rows) of a head and their values, as a tile reads them.
template <typename Number>
inline void lay_ring_block(const Ring& call, int64_t at, int64_t first, int64_t rows, const Block& block,
                           int64_t panel) {
  for (int64_t k = 0; k < rows; ++k) {
    const Number* key = ring_row<Number>(call, call.key_cache, call.key, at, first + k);
    for (int64_t c = 0; c < call.dim; c += kDepth) {
      float* to = block.own_keys + c / kDepth * panel + k * kDepth;
      const int64_t some = least(kDepth, call.dim - c);
      copy_row(to, key + c, some, 0);
      if (!call.key_scale) continue;
      const float* scale = call.key_scale + (first + k) * call.dim + c;
      for (int64_t j = 0; j < some; ++j) to[j] *= scale[j];
    }
    const Number* value = ring_row<Number>(call, call.value_cache, call.value, at, first + k);
    copy_row(block.own_values + k * block.width, value, call.dim, block.width);
  }
}

template <typename Number>
bool ring_chunk_by(const Ring& call, const RingBiases& biases, const RingPart& part) {
  const int64_t keys = call.keys(), tiles = part.tiles.end - part.tiles.first;
  const RingPlan plan(call, tiles);
  const Scratch scratch(static_cast<size_t>(plan.floats()));
  if (!scratch.data()) return false;
  float* scores = scratch.data();
  Block block{};
  block.panel = plan.panel;
  block.width = plan.width;
  block.own_keys = scores + plan.scores();
  block.own_values = block.own_keys + plan.panels * plan.panel;
  block.keys = block.own_keys;
  block.values = block.own_values;
  Run* runs = reinterpret_cast<Run*>(block.own_values + plan.values());
  float* states = block.own_values + plan.values() + plan.runs();
  const int64_t at = part.sequence * call.kv_heads + part.kv_head;
  const auto head_of = [&](int64_t i) { return part.kv_head * call.group() + (part.tiles.first + i) / biases.tiles; };
  const auto tile_of = [&](int64_t i) { return (part.tiles.first + i) % biases.tiles; };
  const auto state = [&](int64_t i) {
    float* query = states + i * plan.tile;
    float* sums = query + kRingRows * align(call.dim, kLanes);
    float* top = sums + kRingRows * plan.width;
    return RingTile{query, sums, top, top + kRingRows};
  };
  const auto bias_of = [&](int64_t i) { return call.bias_of(part.sequence, head_of(i)) * biases.tiles + tile_of(i); };
  for (int64_t i = 0; i < tiles; ++i) {
    begin_ring_tile<Number>(call, part.sequence, head_of(i), tile_of(i) * kRingRows, state(i), plan.width);
  }
  for (int64_t first = 0; first < keys; first += plan.block_rows) {
    const int64_t rows = least(plan.block_rows, keys - first);
    bool laid = false;
    for (int64_t i = 0; i < tiles; ++i) {
      const uint8_t* seen = biases.seen + bias_of(i) * keys + first;
      if (std::memchr(seen, 1, static_cast<size_t>(rows)) == nullptr) continue;
      const int64_t count = find_runs(rows, runs, [&](int64_t k) { return seen[k] != 0; });
      const float* bias = biases.data + (bias_of(i) * keys + first) * kRingRows;
      if (!laid) lay_ring_block<Number>(call, at, first, rows, block, plan.panel);
      laid = true;
      for (int64_t r = 0; r < count; ++r) attend_run(call, block, runs[r], state(i), bias, scores);
    }
  }
  for (int64_t i = 0; i < tiles; ++i) {
    const RingTile tile = state(i);
    const int64_t first = tile_of(i) * kRingRows, count = least(kRingRows, call.rows - first);
    Number* output =
        static_cast<Number*>(call.output) + ((part.sequence * call.heads + head_of(i)) * call.rows + first) * call.dim;
    for (int64_t row = 0; row < count; ++row, output += call.dim) {
      const float factor = 1.0f / tile.total[row];
      for (int64_t c = 0; c < call.dim; c += kLanes) {
        store_some(output + c, load(tile.sums + row * plan.width + c) * factor, least(kLanes, call.dim - c));
      }
    }
  }
  return true;
}

// Some tiles of a chunk's queries.
bool ring_chunk(const Ring& call, const RingBiases& biases, const RingPart& part) {
  return (call.element == Element::fp32 ? ring_chunk_by<float> : ring_chunk_by<uint16_t>)(call, biases, part);
}
