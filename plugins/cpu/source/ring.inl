// Attention to a ring of keys and values. Included once per instruction set, inside its namespace, after tiles.inl,
// whose tiles of queries a chunk uses.
//
// A step has one query a head and reads every key and value once: the products of kLanes keys are added up together.
// A chunk takes tiles of queries. Which keys a tile sees follows from its biases: runs of slots that one of its
// queries sees. Blocks of keys that no tile sees are not even copied.

// Biases of hidden keys lie below, all others above: OUTSIDE_SCORE is -2e30, LOWEST_BIAS -1e30.
constexpr float kSeen = -1.5e30f;

// Keys [from, to) of those attended to.
struct Run {
  int64_t from, to;
};

// A row of queries: in units of log 2, or of the cap; zeros up to a multiple of kLanes.
template <typename Number>
inline void scaled_query(const Ring& call, const Number* query, float* to) {
  const float factor = call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2e;
  for (int64_t c = 0; c < call.dim; c += kLanes)
    store(to + c, load_some(query + c, least(kLanes, call.dim - c)) * factor);
}

// The products of a query with kLanes keys, a vector each that is still to be added up.
template <typename Number>
inline void multiply_keys(const float* query, const Number* keys, int64_t dim, Vector* parts) {
  Vector sums[kLanes] = {};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    const Vector x = load(query + c);
    LOCALATTN_UNROLL
    for (int j = 0; j < kLanes; ++j) sums[j] += x * load_elements(keys + j * dim + c);
  }
  if (c < dim) {
    for (int j = 0; j < kLanes; ++j) sums[j] += load(query + c) * load_some(keys + j * dim + c, dim - c);
  }
  LOCALATTN_UNROLL
  for (int j = 0; j < kLanes; ++j) parts[j] = sums[j];
}

// The same of one key, which may have a scale.
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

// Scores [0, count) become weights, of which none is above 1. Returns their sum, with the sink's.
inline float weigh_scores(const float* sink, float* scores, int64_t count) {
  for (int64_t k = count; k < align(count, kLanes); ++k) scores[k] = kBelowScores;
  Vector tops = splat(sink ? *sink * kLog2e : kBelowScores);
  for (int64_t k = 0; k < count; k += kLanes) tops = larger(tops, load(scores + k));
  float top = tops[0];
  for (int lane = 1; lane < kLanes; ++lane) top = tops[lane] > top ? tops[lane] : top;
  Vector totals = {};
  for (int64_t k = 0; k < count; k += kLanes) {
    const Vector weights = exp2_of(load(scores + k) - top);
    store(scores + k, weights);
    totals += weights;
  }
  float total = sink ? exp2_of(splat(*sink * kLog2e - top))[0] : 0.0f;
  for (int lane = 0; lane < kLanes; ++lane) total += totals[lane];
  return total;
}

// kCount vectors of channels of one row: Σ weight · value / total.
template <int kCount, typename Number>
inline void mean_vectors(const Number* values, int64_t dim, const float* weights, const Run* runs, int64_t count,
                         float total, Number* output) {
  Vector even[kCount] = {}, odd[kCount] = {};
  for (int64_t i = 0; i < count; ++i) {
    const Number* value = values + runs[i].from * dim;
    int64_t k = runs[i].from;
    for (; k + 2 <= runs[i].to; k += 2, value += 2 * dim, weights += 2) {
      LOCALATTN_UNROLL
      for (int c = 0; c < kCount; ++c) {
        even[c] += load_elements(value + c * kLanes) * weights[0];
        odd[c] += load_elements(value + dim + c * kLanes) * weights[1];
      }
    }
    if (k == runs[i].to) continue;
    for (int c = 0; c < kCount; ++c) even[c] += load_elements(value + c * kLanes) * weights[0];
    ++weights;
  }
  const float factor = 1.0f / total;
  for (int c = 0; c < kCount; ++c) store_elements(output + c * kLanes, (even[c] + odd[c]) * factor);
}

// All channels of one row.
template <typename Number>
inline void mean_row(const Number* values, int64_t dim, const float* weights, const Run* runs, int64_t count,
                     float total, Number* output) {
  int64_t c = 0;
  for (; c + 4 * kLanes <= dim; c += 4 * kLanes) {
    mean_vectors<4>(values + c, dim, weights, runs, count, total, output + c);
  }
  for (; c + kLanes <= dim; c += kLanes) mean_vectors<1>(values + c, dim, weights, runs, count, total, output + c);
  if (c == dim) return;
  Vector sum = {};
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = runs[i].from; k < runs[i].to; ++k) sum += load_some(values + k * dim + c, dim - c) * *weights++;
  }
  store_some(output + c, sum * (1.0f / total), dim - c);
}

// The runs of keys for which `sees` says so; all keys if there is none, which then have equal weights.
template <typename Sees>
inline int64_t find_runs(int64_t keys, Run* runs, Sees sees) {
  int64_t count = 0;
  for (int64_t k = 0; k < keys; ++k) {
    if (!sees(k)) continue;
    if (count == 0 || runs[count - 1].to != k) runs[count++] = {k, k};
    runs[count - 1].to = k + 1;
  }
  if (count == 0) runs[count++] = {0, keys};
  return count;
}

// One query of a head, against the runs of keys that it sees.
template <typename Number>
inline void step_head(const Ring& call, int64_t sequence, int64_t head, const Run* runs, int64_t count, float* memory) {
  const int64_t ring = (sequence * call.kv_heads + head / call.group()) * call.slots * call.dim;
  const int64_t own = (sequence * call.heads + head) * call.dim;
  const Number* keys = static_cast<const Number*>(call.next_key) + ring;
  const float* bias = call.bias + call.bias_of(sequence, head) * call.slots;
  float* query = memory;
  float* scores = memory + align(call.dim, kLanes);
  scaled_query(call, static_cast<const Number*>(call.query) + own, query);
  int64_t found = 0;
  for (int64_t i = 0; i < count; ++i) {
    for (int64_t k = runs[i].from; k < runs[i].to; k += kLanes) {
      const int64_t some = least(kLanes, runs[i].to - k);
      Vector parts[kLanes];
      alignas(64) float sums[kLanes];
      if (some == kLanes && !call.key_scale) {
        multiply_keys(query, keys + k * call.dim, call.dim, parts);
      } else {
        for (int64_t j = 0; j < kLanes; ++j) {
          const int64_t at = k + least(j, some - 1);
          const float* scale = call.key_scale ? call.key_scale + at * call.dim : nullptr;
          parts[j] = multiply_key(query, keys + at * call.dim, scale, call.dim);
        }
      }
      add_lanes(parts, sums);
      const Vector biases = some == kLanes ? load_elements(bias + k) : load_some(bias + k, some);
      store_elements(scores + found, biased(call, load(sums), biases));  // there is room for a vector behind the last
      found += some;
    }
  }
  const float total = weigh_scores(call.sinks ? call.sinks + head : nullptr, scores, found);
  mean_row(static_cast<const Number*>(call.next_value) + ring, call.dim, scores, runs, count, total,
           static_cast<Number*>(call.output) + own);
}

template <typename Number>
bool ring_step_by(const Ring& call, Range heads) {
  const int64_t runs_floats = align((call.slots / 2 + 1) * 4, 16);
  const Scratch scratch(
      static_cast<size_t>(runs_floats + align(call.dim, kLanes) + align(call.slots, kLanes) + kLanes));
  if (!scratch.data()) return false;
  Run* runs = reinterpret_cast<Run*>(scratch.data());
  const int64_t size = call.slots * call.dim;
  for (int64_t at = heads.first; at < heads.end; ++at) {
    const int64_t sequence = at / call.kv_heads, kv_head = at % call.kv_heads, slot = call.write_index[at * 3 + 2];
    const auto write = [&](const void* cache, const void* given, void* next) {
      Number* ring = static_cast<Number*>(next) + at * size;
      if (cache != next) {
        std::memcpy(ring, static_cast<const Number*>(cache) + at * size, static_cast<size_t>(size) * sizeof(Number));
      }
      std::memcpy(ring + slot * call.dim, static_cast<const Number*>(given) + at * call.dim,
                  static_cast<size_t>(call.dim) * sizeof(Number));
    };
    write(call.key_cache, call.key, call.next_key);
    write(call.value_cache, call.value, call.next_value);
    int64_t known = -1, count = 0;
    for (int64_t head = kv_head * call.group(); head < (kv_head + 1) * call.group(); ++head) {
      const int64_t which = call.bias_of(sequence, head);
      const float* bias = call.bias + which * call.slots;
      if (which != known) count = find_runs(call.slots, runs, [&](int64_t k) { return bias[k] > kSeen; });
      known = which;
      step_head<Number>(call, sequence, head, runs, count, scratch.data() + runs_floats);
    }
  }
  return true;
}

// Heads of keys [first, end) of a step, in the order of sequences.
bool ring_step(const Ring& call, Range heads) {
  return (call.element == Element::fp32 ? ring_step_by<float> : ring_step_by<uint16_t>)(call, heads);
}

constexpr int64_t kRingRows = kWide * kLanes;  // queries of a chunk's tile

// Tiles [first, end) of the biases of a chunk, transposed, in units of log 2. Lanes past the last row repeat it.
void ring_biases(const Ring& call, const RingBiases& biases, Range tiles) {
  const int64_t keys = call.keys();
  for (int64_t at = tiles.first; at < tiles.end; ++at) {
    const int64_t first = at % biases.tiles * kRingRows;
    const float* from = call.bias + at / biases.tiles * call.rows * keys;
    float* to = biases.data + at * keys * kRingRows;
    for (int v = 0; v < kWide; ++v) {
      for (int64_t k = 0; k < keys; k += kLanes) {
        const int64_t some = least(kLanes, keys - k);
        Vector square[kLanes];
        for (int64_t i = 0; i < kLanes; ++i) {
          const float* row = from + least(first + v * kLanes + i, call.rows - 1) * keys + k;
          square[i] = some == kLanes ? load_elements(row) : load_some(row, some);
        }
        transpose(square);
        for (int64_t i = 0; i < some; ++i) store(to + ((k + i) * kWide + v) * kLanes, square[i] * kLog2e);
      }
    }
  }
}

// Whether a query of a tile sees no key at all: it gets the mean of all, as everywhere.
inline bool sees_nothing(const float* bias, int64_t keys) {
  Vector tops[kWide];
  for (Vector& top : tops) top = splat(kBelowScores);
  for (int64_t k = 0; k < keys * kWide; ++k) tops[k % kWide] = larger(tops[k % kWide], load(bias + k * kLanes));
  for (const Vector& top : tops) {
    for (int lane = 0; lane < kLanes; ++lane) {
      if (!(top[lane] > kSeen * kLog2e)) return true;
    }
  }
  return false;
}

// The largest bias of a key in a tile.
inline bool is_seen(const float* bias) {
  Vector top = load(bias);
  for (int v = 1; v < kWide; ++v) top = larger(top, load(bias + v * kLanes));
  const Integers seen = top > splat(kSeen * kLog2e);
  for (int lane = 0; lane < kLanes; ++lane) {
    if (seen[lane]) return true;
  }
  return false;
}

// What a chunk's tile keeps between blocks of keys.
struct RingTile {
  float* query;  // [dim][kRingRows]
  float* sums;   // [kRingRows][width]
  float* top;
  float* total;
  float* blind;  // 1 if one of its queries sees no key at all
};

// How a chunk's scratch memory is divided; sizes in floats.
struct RingPlan {
  int64_t width, panels, block_rows, panel, tile;

  RingPlan(const Ring& call, int64_t tiles) : count(tiles) {
    width = align(call.dim, 16);
    panels = divide_up(call.dim, kDepth);
    block_rows = least(most(kBlockFloats / (panels * kDepth + width) / kStep * kStep, kStep), align(call.keys(), 16));
    panel = (block_rows + kPadding) * kDepth;
    tile = kRingRows * (align(call.dim, kLanes) + width + 2) + 16;
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
  const float factor = call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2e;
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
      weigh_rows<kRingRows, kValueVectors>(block.values + at * block.width, block.width, scores + r, count, shrink + r,
                                           tile.sums + r * block.width, align(call.dim, kLanes));
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
    return RingTile{query, sums, top, top + kRingRows, top + 2 * kRingRows};
  };
  const auto bias_of = [&](int64_t i) { return biases.of(call, call.bias_of(part.sequence, head_of(i)), tile_of(i)); };
  for (int64_t i = 0; i < tiles; ++i) {
    begin_ring_tile<Number>(call, part.sequence, head_of(i), tile_of(i) * kRingRows, state(i), plan.width);
    *state(i).blind = sees_nothing(bias_of(i), keys) ? 1.0f : 0.0f;
  }
  for (int64_t first = 0; first < keys; first += plan.block_rows) {
    const int64_t rows = least(plan.block_rows, keys - first);
    bool laid = false;
    for (int64_t i = 0; i < tiles; ++i) {
      const float* bias = bias_of(i) + first * kRingRows;
      const bool all = *state(i).blind != 0;
      const int64_t count = find_runs(rows, runs, [&](int64_t k) { return all || is_seen(bias + k * kRingRows); });
      // Without a visible key `find_runs` gives all, which are hidden here: the rest of the keys has some.
      if (!all && count == 1 && !is_seen(bias + runs[0].from * kRingRows)) continue;
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
