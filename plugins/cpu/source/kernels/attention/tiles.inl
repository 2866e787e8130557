// The computation, for whatever vectors `vectors.inl` has. Included once per instruction set, inside its namespace.
//
// For the scores, queries sit in the lanes: a tile of them is held transposed, [channel][query], and so are its scores,
// [key][query]. The product broadcasts single elements of keys, and the softmax runs along the keys without ever
// combining lanes. For the sums, [query][channel], channels sit in the lanes, and single weights are broadcast: few
// queries at a time, so that hardly a hidden key is multiplied.
//
// Keys are taken in blocks that begin at fixed positions of the sequence: the rows of a block that the mask keeps are
// copied side by side (rows that are far apart in memory share cache sets), and every tile attends to them. Between
// blocks a tile keeps its running maximum and sums (Milakov & Gimelshein, arXiv 1805.02867), so that memory is bounded
// whatever the window. Scores are in units of log 2: the factor is in the queries.

#include "kernels/attention/layout.inl"

#include "kernels/attention/copies.inl"

#include "kernels/attention/decay.inl"

// Scores of kKeys keys, from row `key` of the block on, with kCount of the tile's kVectors vectors of queries.
template <int kVectors, int kCount, int kKeys>
inline void score_group(const Block& block, int64_t key, const float* query, int64_t head_dim, float* scores) {
  Vector sums[kKeys][kCount] = {};
  for (int64_t from = 0; from < head_dim; from += kDepth) {
    const float* keys = block.keys + from / kDepth * block.panel + key * kDepth;
    const float* const end = keys + least(kDepth, head_dim - from);
    for (; keys < end; ++keys, query += kVectors * kLanes) {
      Vector x[kCount];
      for (int v = 0; v < kCount; ++v) x[v] = load(query + v * kLanes);
      LOCALATTN_UNROLL
      for (int k = 0; k < kKeys; ++k) {
        for (int v = 0; v < kCount; ++v) sums[k][v] += keys[k * kDepth] * x[v];
      }
    }
  }
  LOCALATTN_UNROLL
  for (int k = 0; k < kKeys; ++k) {
    for (int v = 0; v < kCount; ++v) store(scores + (k * kVectors + v) * kLanes, sums[k][v]);
  }
}

// The rows of a block that are computed: those that some lane of a vector of queries sees.
struct Reach {
  int64_t from, to;

  Reach within(int64_t first, int64_t end) const { return {most(from, first), least(to, end)}; }
};

// Scores of rows `some`, with kCount vectors from `vector` on. The last group may write beyond them.
template <int kVectors, int kCount>
inline void score_rows(const Block& block, Reach some, const Tile& tile, int vector, int64_t head_dim, float* scores,
                       int64_t at, Ahead& ahead) {
  constexpr int kKeys = kCount == 1 ? kSingle : kGroup;
  for (int64_t key = some.from; key < some.to; key += kKeys) {
    float* to = scores + ((key - at) * kVectors + vector) * kLanes;
    score_group<kVectors, kCount, kKeys>(block, key, tile.query + vector * kLanes, head_dim, to);
    ahead.go_on();
  }
}

// Scores of rows [at, at + count). Queries see intervals of keys with rising ends, so at first the first vectors see a
// key, then all of them, and at last the last ones. Later rows overwrite what a group wrote beyond its own.
template <int kVectors>
inline void score_step(const Block& block, const Reach* reach, const Tile& tile, int64_t head_dim, float* scores,
                       int64_t at, int64_t count, Ahead& ahead) {
  const Reach first = reach[0].within(at, at + count), last = reach[kVectors - 1].within(at, at + count);
  if constexpr (kVectors == 1) {
    score_rows<1, 1>(block, first, tile, 0, head_dim, scores, at, ahead);
  } else if constexpr (kVectors == 2) {
    const int64_t from = most(last.from, first.from), to = least(first.to, last.to);
    if (from >= to) {  // no row for both
      score_rows<2, 1>(block, first, tile, 0, head_dim, scores, at, ahead);
      score_rows<2, 1>(block, last, tile, 1, head_dim, scores, at, ahead);
      return;
    }
    score_rows<2, 1>(block, {first.from, from}, tile, 0, head_dim, scores, at, ahead);
    score_rows<2, 2>(block, {from, to}, tile, 0, head_dim, scores, at, ahead);
    score_rows<2, 1>(block, {to, last.to}, tile, 1, head_dim, scores, at, ahead);
  } else {
    static_assert(kVectors == 4, "tiles have one, two or four vectors");
    const Reach second = reach[1].within(at, at + count), third = reach[2].within(at, at + count);
    const int64_t from = most(last.from, first.from), to = least(first.to, last.to);
    if (from >= to) {
      const int64_t end = most(first.to, second.to), begin = least(third.from, last.from);
      score_rows<4, 2>(block, {first.from, end}, tile, 0, head_dim, scores, at, ahead);
      score_rows<4, 2>(block, {begin, last.to}, tile, 2, head_dim, scores, at, ahead);
      return;
    }
    score_rows<4, 2>(block, {first.from, from}, tile, 0, head_dim, scores, at, ahead);
    score_rows<4, 1>(block, {most(third.from, first.from), from}, tile, 2, head_dim, scores, at, ahead);
    score_rows<4, 4>(block, {from, to}, tile, 0, head_dim, scores, at, ahead);
    score_rows<4, 1>(block, {to, least(second.to, last.to)}, tile, 1, head_dim, scores, at, ahead);
    score_rows<4, 2>(block, {to, last.to}, tile, 2, head_dim, scores, at, ahead);
  }
}

// Where the sums of kValueRows queries go: to the tile, from where the next keys' go on. `shrink` is what those so far
// are worth; null if there are none.
struct Sums {
  float* data;
  int64_t width;
  const float* shrink;

  Vector begin(int row, int64_t c) const { return shrink ? load(data + row * width + c) * shrink[row] : Vector{}; }
  void end(int row, int64_t c, Vector sum) const { store(data + row * width + c, sum); }
};

// Or, times the row's factor, into the output: of a tile that is done with these keys.
template <typename Number>
struct Outputs {
  Number* data;
  int64_t row_stride;
  const float* factor;

  Vector begin(int, int64_t) const { return Vector{}; }
  void end(int row, int64_t c, Vector sum) const { store_elements(data + row * row_stride + c, sum * factor[row]); }
};

// kCount vectors of channels, from `c` on, of kValueRows queries: Σ weight · value over `count` values. Weights lie as
// scores do, [key][kRows].
template <int kRows, int kCount, typename To>
inline void weigh_group(const float* values, int64_t width, const float* weights, int64_t count, const To& to,
                        int64_t c) {
  Vector acc[kValueRows][kCount];
  LOCALATTN_UNROLL
  for (int r = 0; r < kValueRows; ++r) {
    for (int i = 0; i < kCount; ++i) acc[r][i] = to.begin(r, c + i * kLanes);
  }
  values += c;
  for (int64_t k = 0; k < count; ++k, values += width, weights += kRows) {
    Vector x[kCount];
    for (int i = 0; i < kCount; ++i) x[i] = load_elements(values + i * kLanes);
    LOCALATTN_UNROLL
    for (int r = 0; r < kValueRows; ++r) {
      for (int i = 0; i < kCount; ++i) acc[r][i] += weights[r] * x[i];
    }
  }
  LOCALATTN_UNROLL
  for (int r = 0; r < kValueRows; ++r) {
    for (int i = 0; i < kCount; ++i) to.end(r, c + i * kLanes, acc[r][i]);
  }
}

// Channels [c, channels) of kValueRows queries, kCount vectors of them at a time and the rest in fewer.
template <int kRows, int kCount, typename To>
inline void weigh_rows(const float* values, int64_t width, const float* weights, int64_t count, const To& to,
                       int64_t channels, int64_t c = 0) {
  for (; c + kCount * kLanes <= channels; c += kCount * kLanes) {
    weigh_group<kRows, kCount>(values, width, weights, count, to, c);
  }
  if constexpr (kCount > 1) {
    if (c < channels) weigh_rows<kRows, kCount - 1>(values, width, weights, count, to, channels, c);
  }
}

// The scores of one vector of queries, rows [0, count), become weights; the maximum and the total are brought up to
// date. `shrink` is what the sums so far are worth beside them.
template <int kVectors>
inline void soften(float* scores, int64_t count, float* top, float* total, float* shrink) {
  constexpr int kStride = kVectors * kLanes;
  const Vector before = load(top);
  Vector tops[4] = {before, before, before, before};  // several, because each waits for the one before
  int64_t k = 0;
  for (; k + 4 <= count; k += 4) {
    LOCALATTN_UNROLL
    for (int i = 0; i < 4; ++i) tops[i] = larger(tops[i], load(scores + (k + i) * kStride));
  }
  for (; k < count; ++k) tops[0] = larger(tops[0], load(scores + k * kStride));
  const Vector now = larger(larger(tops[0], tops[1]), larger(tops[2], tops[3]));
  const Vector worth = exp2_of(before - now);
  Vector totals[2] = {load(total) * worth, Vector{}};
  for (k = 0; k + 2 <= count; k += 2) {
    LOCALATTN_UNROLL
    for (int i = 0; i < 2; ++i) {
      const Vector weight = exp2_of(load(scores + (k + i) * kStride) - now);
      store(scores + (k + i) * kStride, weight);
      totals[i] += weight;
    }
  }
  if (k < count) {
    const Vector weight = exp2_of(load(scores + k * kStride) - now);
    store(scores + k * kStride, weight);
    totals[0] += weight;
  }
  store(top, now);
  store(total, totals[0] + totals[1]);
  store(shrink, worth);
}

// Scores of one vector of queries, rows [at, at + count) of the block, are hidden from lanes that do not see them:
// those whose first key comes later, and those whose last came before.
template <int kVectors>
inline void hide(float* scores, int64_t at, int64_t count, const int32_t* first, const int32_t* end) {
  constexpr int kStride = kVectors * kLanes;
  const int64_t all_from = least(first[kLanes - 1] - at, count), all_to = most(end[0] - at, 0);  // seen by every lane
  const Integers firsts = load(first), ends = load(end);
  for (int64_t k = 0; k < all_from; ++k) {
    const Integers key = static_cast<int32_t>(at + k) - Integers{};
    store(scores + k * kStride, key >= firsts ? load(scores + k * kStride) : splat(kHidden));
  }
  for (int64_t k = all_to; k < count; ++k) {
    const Integers key = static_cast<int32_t>(at + k) - Integers{};
    store(scores + k * kStride, key < ends ? load(scores + k * kStride) : splat(kHidden));
  }
}

// The scores of one vector of queries come divided by the cap, and are capped.
template <int kVectors>
inline void cap_scores(float cap, float* scores, int64_t count) {
  for (int64_t k = 0; k < count; ++k, scores += kVectors * kLanes) {
    store(scores, relative_tanh_of(load(scores)) * (cap * kLog2e));
  }
}

// Biases as they are added to scores; NaN stays NaN.
inline float raised(float bias) { return (bias < kLowestBias ? kLowestBias : bias) * kLog2e; }
inline Vector raised(Vector bias) { return larger(splat(kLowestBias), bias) * kLog2e; }

// The biases of one vector of queries are added to the scores of rows [at, at + count) of the block.
template <int kVectors, typename Number>
inline void add_bias(const Call& call, int64_t head, const Block& block, const Tile& tile, int vector, float* scores,
                     int64_t at, int64_t count) {
  const Number* biases = static_cast<const Number*>(call.attn_bias);
  int64_t rows[kLanes];          // where a lane's bias for the block's first position is
  int64_t from = 0, to = count;  // rows that all lanes have a bias for, and whose positions are consecutive
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t query = tile.first + least(vector * kLanes + lane, tile.count - 1);
    const Interval gathered = gathered_interval(call.window, query);
    rows[lane] = bias_row(call.window, head, query) + block.first;
    from = most(from, block.row_at(gathered.first) - at);
    to = least(to, block.row_at(gathered.end) - at);
  }
  if (call.key_mask) to = from;
  scores += vector * kLanes;
  int64_t k = from;
  for (; k + kLanes <= to; k += kLanes) {
    Vector square[kLanes];
    LOCALATTN_UNROLL
    for (int lane = 0; lane < kLanes; ++lane) square[lane] = load_elements(biases + rows[lane] + at + k);
    transpose(square);
    LOCALATTN_UNROLL
    for (int i = 0; i < kLanes; ++i) {
      float* score = scores + (k + i) * kVectors * kLanes;
      store(score, load(score) + raised(square[i]));
    }
  }
  for (int lane = 0; lane < kLanes; ++lane) {
    const int64_t slot = least(vector * kLanes + lane, tile.count - 1);
    const int64_t begin = most(block.row_at(tile.seen[slot]) - at, 0);
    const int64_t end = least(block.row_at(tile.seen[kVectors * kLanes + slot]) - at, count);
    for (int64_t i = begin; i < end; ++i) {
      if (i >= from && i < k) continue;
      scores[i * kVectors * kLanes + lane] +=
          raised(widen_element(biases[rows[lane] - block.first + block.position_of(at + i)]));
    }
  }
}

// A token's score with itself.
template <int kVectors>
inline void set_own_scores(const Block& block, const Tile& tile, float* scores, int64_t at, int64_t count) {
  for (int64_t lane = 0; lane < tile.count; ++lane) {
    const int64_t row = block.row_at(tile.first + lane);
    if (tile.first + lane < block.first || row == block.row_at(tile.first + lane + 1)) continue;  // not in it, not kept
    if (row >= at && row < at + count) scores[(row - at) * kVectors * kLanes + lane] = kSelfScore * kLog2e;
  }
}

// Values that are not finite, of rows [at, at + count) of the block: only queries that see them get them, whatever
// their weight.
template <int kVectors, typename Number>
void add_not_finite(const Call& call, const Rows& rows, const Block& block, const Tile& tile, const float* weights,
                    int64_t at, int64_t count, const int32_t* first, const int32_t* end) {
  const Number* values = static_cast<const Number*>(call.value) + rows.key_origin(call);
  for (int64_t k = 0; k < count; ++k, weights += kVectors * kLanes) {
    const Number* row = values + block.position_of(at + k) * call.key_layout.row;
    for (int64_t c = 0; c < call.head_dim; ++c) {
      const float value = widen_element(row[c]);
      if (std::isfinite(value)) continue;
      for (int lane = 0; lane < kVectors * kLanes; ++lane) {
        if (at + k >= first[lane] && at + k < end[lane]) tile.sums[lane * block.width + c] += weights[lane] * value;
      }
    }
  }
}

// One tile attends to one block, which may be its first and its last. `scores` holds kStep + kPadding keys. True: the
// outputs are written, because its keys were taken at once; the tile has no sums then.
template <int kVectors, typename Number>
bool attend(const Call& call, const Rows& task, const Block& block, Tile& tile, bool begins, bool ends, float* scores) {
  constexpr int kRows = kVectors * kLanes;
  alignas(64) int32_t first[kRows], end[kRows];
  alignas(64) float shrink[kRows];
  for (int lane = 0; lane < kRows; ++lane) {
    first[lane] = static_cast<int32_t>(block.place_of(tile.seen[lane]));
    end[lane] = static_cast<int32_t>(block.place_of(tile.seen[kRows + lane]));
  }
  for (int lane = 0; block.masked && lane < kRows; ++lane) {
    first[lane] = block.rank[first[lane]];
    end[lane] = block.rank[end[lane]];
  }
  const int64_t rows = end[kRows - 1] - first[0];
  const bool at_once =
      begins && ends && rows > 0 && rows <= kStep && block.finite && tile.count == kRows && call.head_dim % kLanes == 0;
  for (int64_t i = 0; begins && !at_once && i < kRows * block.width; i += kLanes) store(tile.sums + i, Vector{});
  if (rows <= 0) return false;
  Reach reach[kVectors];
  for (int v = 0; v < kVectors; ++v) reach[v] = {first[v * kLanes], end[v * kLanes + kLanes - 1]};
  Number* const output = static_cast<Number*>(call.output) + task.origin(call) + tile.first * call.layout.row;
  const int64_t steps = divide_up(rows, kStep);
  const int64_t step = align(divide_up(rows, steps), kGroup);
  Ahead ahead = ahead_of<Number>(call, task, tile, block.end, kRows, rows / kGroup + steps * (kRows / kValueRows));
  for (int64_t at = first[0]; at < end[kRows - 1]; at += step) {
    const int64_t count = least(step, end[kRows - 1] - at);
    score_step<kVectors>(block, reach, tile, call.head_dim, scores, at, count, ahead);
    for (int v = 0; v < kVectors && (call.softcap > 0 || call.attn_bias); ++v) {
      const Reach some = reach[v].within(at, at + count);
      float* from = scores + (some.from - at) * kRows;
      if (call.softcap > 0) cap_scores<kVectors>(call.softcap, from + v * kLanes, some.to - some.from);
      if (!call.attn_bias) continue;
      if (call.bias_element == Element::fp32) {
        add_bias<kVectors, float>(call, task.head, block, tile, v, from, some.from, some.to - some.from);
      } else {
        add_bias<kVectors, uint16_t>(call, task.head, block, tile, v, from, some.from, some.to - some.from);
      }
    }
    if (call.shared_qk) set_own_scores<kVectors>(block, tile, scores, at, count);
    for (int v = 0; v < kVectors; ++v) {
      const Reach some = reach[v].within(at, at + count);
      const int64_t own = some.to - some.from;
      if (own <= 0 && !at_once) continue;
      float* own_scores = scores + ((some.from - at) * kVectors + v) * kLanes;
      if (own > 0) {
        hide<kVectors>(own_scores, some.from, own, first + v * kLanes, end + v * kLanes);
        soften<kVectors>(own_scores, own, tile.top + v * kLanes, tile.total + v * kLanes, shrink + v * kLanes);
      }
      if (at_once) store(shrink + v * kLanes, factor_of(load(tile.total + v * kLanes)));
      for (int r = v * kLanes; r < (v + 1) * kLanes; r += kValueRows) {
        const Reach seen = Reach{first[r], end[r + kValueRows - 1]}.within(at, at + count);
        const float* values = block.values + seen.from * block.width;
        const float* weights = scores + (seen.from - at) * kRows + r;
        if (at_once) {
          const Outputs<Number> to{output + r * call.layout.row, call.layout.row, shrink + r};
          weigh_rows<kRows, kValueVectors>(values, block.width, weights, seen.to - seen.from, to, call.head_dim);
        } else if (seen.from < seen.to) {  // else `shrink` is 1
          const Sums to{tile.sums + r * block.width, block.width, begins && at == first[0] ? nullptr : shrink + r};
          weigh_rows<kRows, kValueVectors>(values, block.width, weights, seen.to - seen.from, to,
                                           align(call.head_dim, kLanes));
        }
        ahead.go_on();
      }
    }
    if (!block.finite) add_not_finite<kVectors, Number>(call, task, block, tile, scores, at, count, first, end);
  }
  return at_once;
}

// All queries of `rows`. False: they need more floats of scratch than `most_floats`, or there is no memory, and nothing
// was written.
template <int kVectors, typename Number>
bool attend_rows_by(const Call& call, const Rows& rows, int64_t most_floats) {
  constexpr int kRows = kVectors * kLanes;
  const Interval span{visible_interval(call.window, rows.first, call.length).first,
                      visible_interval(call.window, rows.end - 1, call.length).end};
  const int64_t tiles = divide_up(rows.end - rows.first, kRows);
  const Plan plan(call, span.end - span.first, kRows, tiles);
  if (plan.floats() > most_floats) return false;
  const Scratch memory(static_cast<size_t>(plan.floats()));
  if (!memory.data()) return false;
  float* scores = memory.data();
  Block block;
  block.panel = plan.panel;
  block.width = plan.width;
  block.own_keys = scores + plan.scores();
  block.own_values = block.own_keys + plan.keys();
  block.rank = reinterpret_cast<int32_t*>(block.own_values + plan.values());
  block.position = block.rank + plan.integers();
  float* state = reinterpret_cast<float*>(block.position + plan.integers());
  const Decay decay(call, state + plan.places * plan.tile);

  int64_t next = 0;  // the first tile that is not done
  for (int64_t from = span.first / plan.block_rows * plan.block_rows; from < span.end; from += plan.block_rows) {
    const int64_t limit = least(from + plan.block_rows, span.end);
    begin_block<Number>(call, rows, block, most(from, span.first), limit);
    const int64_t centre = from + plan.block_rows / 2;  // the same however the sequence is cut into tasks
    for (int64_t i = next; i < tiles; ++i) {
      const int64_t first_query = rows.first + i * kRows;
      const int64_t last_query = least(first_query + kRows, rows.end) - 1;
      const int64_t first = visible_interval(call.window, first_query, call.length).first;
      const int64_t end = visible_interval(call.window, last_query, call.length).end;
      if (first >= limit) break;  // its keys, and all later ones', are still to come
      Tile tile = tile_at(plan, state, rows, i, first < block.first || end > limit);
      const int64_t scaled = block.kept;
      extend_block<Number>(call, rows, block, least(end, limit));
      if (decay.rates) decay.scale_keys(block, scaled, centre);
      const bool begins = first >= block.first;
      if (begins) begin_tile<kVectors, Number>(call, rows, tile);
      Tile seen = tile;
      if (decay.rates) seen.query = decay.scaled<kVectors>(tile, centre);
      const bool done = attend<kVectors, Number>(call, rows, block, seen, begins, end <= limit, scores);
      if (end > limit) continue;
      if (!done) end_tile<kVectors, Number>(call, rows, tile, plan.width);
      next = i + 1;
    }
  }
  return true;
}

bool attend_rows(const Call& call, const Rows& rows, int64_t most_floats) {
  // With few queries small tiles waste less.
  const bool wide = call.length > kNarrow * kLanes;
  if (call.element == Element::fp32) {
    return (wide ? attend_rows_by<kWide, float> : attend_rows_by<kNarrow, float>)(call, rows, most_floats);
  }
  return (wide ? attend_rows_by<kWide, uint16_t> : attend_rows_by<kNarrow, uint16_t>)(call, rows, most_floats);
}
