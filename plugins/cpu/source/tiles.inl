// The computation, for whatever vectors `vectors.inl` has. Included once per instruction set, inside its namespace.
//
// Queries sit in the lanes: a tile of them is held transposed, [channel][query], and so are its scores, [key][query],
// and its sums, [channel][query]. Then both matrix products broadcast single elements of keys and values and multiply
// them with vectors of queries, and the softmax runs along the keys without ever combining lanes.
//
// Keys are taken in blocks that begin at fixed positions of the sequence: the rows of a block that the mask keeps are
// copied side by side (rows that are far apart in memory share cache sets), and every tile attends to them. Between
// blocks a tile keeps its running maximum and sums (Milakov & Gimelshein, arXiv 1805.02867), so that memory is bounded
// whatever the window. Scores are in units of log 2: the factor is in the queries.

#include "layout.inl"

#include "copies.inl"

#include "decay.inl"

constexpr int64_t kNarrowReach = 128;  // exact windows up to this are faster with narrow tiles

// Scores of kGroup keys, from row `key` of the block on: [kGroup][kVectors].
template <int kVectors>
inline void score_group(const Block& block, int64_t key, const Tile& tile, int64_t head_dim, float* scores) {
  Vector sums[kGroup][kVectors] = {};
  const float* query = tile.query;
  for (int64_t from = 0; from < head_dim; from += kDepth) {
    const float* keys = block.keys + from / kDepth * block.panel + key * kDepth;
    const int64_t depth = least(kDepth, head_dim - from);
    for (int64_t c = 0; c < depth; ++c, query += kVectors * kLanes) {
      Vector x[kVectors];
      for (int v = 0; v < kVectors; ++v) x[v] = load(query + v * kLanes);
      LOCALATTN_UNROLL
      for (int k = 0; k < kGroup; ++k) {
        for (int v = 0; v < kVectors; ++v) sums[k][v] += keys[k * kDepth + c] * x[v];
      }
    }
  }
  LOCALATTN_UNROLL
  for (int k = 0; k < kGroup; ++k) {
    for (int v = 0; v < kVectors; ++v) store(scores + (k * kVectors + v) * kLanes, sums[k][v]);
  }
}

// kGroup channels of the weighted sum of `count` values: sums · shrink + Σ weight · value.
template <int kVectors>
inline void weigh_group(const float* values, int64_t width, const float* weights, int64_t count, const Vector* shrink,
                        float* sums) {
  Vector acc[kGroup][kVectors];
  LOCALATTN_UNROLL
  for (int c = 0; c < kGroup; ++c) {
    for (int v = 0; v < kVectors; ++v) acc[c][v] = load(sums + (c * kVectors + v) * kLanes) * shrink[v];
  }
  for (int64_t k = 0; k < count; ++k, values += width, weights += kVectors * kLanes) {
    Vector p[kVectors];
    for (int v = 0; v < kVectors; ++v) p[v] = load(weights + v * kLanes);
    LOCALATTN_UNROLL
    for (int c = 0; c < kGroup; ++c) {
      for (int v = 0; v < kVectors; ++v) acc[c][v] += values[c] * p[v];
    }
  }
  LOCALATTN_UNROLL
  for (int c = 0; c < kGroup; ++c) {
    for (int v = 0; v < kVectors; ++v) store(sums + (c * kVectors + v) * kLanes, acc[c][v]);
  }
}

// Scores become weights; the tile's maximum and total are brought up to date. `shrink` is what the sums so far are
// worth beside them.
template <int kVectors>
inline void soften(float* scores, int64_t count, Tile& tile, Vector* shrink) {
  Vector top[kVectors], total[kVectors];
  for (int v = 0; v < kVectors; ++v) top[v] = load(tile.top + v * kLanes);
  for (int64_t k = 0; k < count; ++k) {
    for (int v = 0; v < kVectors; ++v) top[v] = larger(top[v], load(scores + (k * kVectors + v) * kLanes));
  }
  for (int v = 0; v < kVectors; ++v) {
    shrink[v] = exp2_of(load(tile.top + v * kLanes) - top[v]);
    total[v] = load(tile.total + v * kLanes) * shrink[v];
    store(tile.top + v * kLanes, top[v]);
  }
  for (int64_t k = 0; k < count; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      const Vector weight = exp2_of(load(scores + (k * kVectors + v) * kLanes) - top[v]);
      store(scores + (k * kVectors + v) * kLanes, weight);
      total[v] += weight;
    }
  }
  for (int v = 0; v < kVectors; ++v) store(tile.total + v * kLanes, total[v]);
}

// Keys [from, to) of the scores, which begin at row `at` of the block, are hidden from lanes that do not see them.
template <int kVectors>
inline void hide(float* scores, int64_t at, int64_t from, int64_t to, const int32_t* first, const int32_t* end) {
  for (int64_t k = from; k < to; ++k) {
    for (int v = 0; v < kVectors; ++v) {
      const Integers key = static_cast<int32_t>(k) - Integers{};
      float* score = scores + ((k - at) * kVectors + v) * kLanes;
      store(score, ((key >= load(first + v * kLanes)) & (key < load(end + v * kLanes))) ? load(score) : splat(kHidden));
    }
  }
}

// Scores that come divided by the cap are capped.
template <int kVectors>
inline void cap_scores(float cap, float* scores, int64_t count) {
  for (int64_t i = 0; i < count * kVectors * kLanes; i += kLanes) {
    store(scores + i, relative_tanh_of(load(scores + i)) * (cap * kLog2e));
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
      scores[i * kVectors * kLanes + lane] += raised(widen_element(biases[rows[lane] + block.position[at + i]]));
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
    const Number* row = values + (block.first + block.position[at + k]) * call.key_layout.row;
    const Integers key = static_cast<int32_t>(at + k) - Integers{};
    for (int64_t c = 0; c < call.head_dim; ++c) {
      const float value = widen_element(row[c]);
      if (std::isfinite(value)) continue;
      float* sums = tile.sums + c * kVectors * kLanes;
      for (int v = 0; v < kVectors * kLanes; v += kLanes) {
        const Vector sum = load(sums + v);
        store(sums + v, ((key >= load(first + v)) & (key < load(end + v))) ? sum + load(weights + v) * value : sum);
      }
    }
  }
}

// One tile attends to one block. `scores` holds kStep + kGroup keys.
template <int kVectors, typename Number>
void attend(const Call& call, const Rows& task, const Block& block, Tile& tile, float* scores) {
  constexpr int kRows = kVectors * kLanes;
  alignas(64) int32_t first[kRows], end[kRows];
  for (int lane = 0; lane < kRows; ++lane) {
    first[lane] = static_cast<int32_t>(block.row_at(tile.seen[lane]));
    end[lane] = static_cast<int32_t>(block.row_at(tile.seen[kRows + lane]));
  }
  const int64_t rows = end[kRows - 1] - first[0];
  if (rows <= 0) return;
  const int64_t steps = (rows + kStep - 1) / kStep;
  const int64_t step = align(divide_up(rows, steps), kGroup);
  for (int64_t at = first[0]; at < end[kRows - 1]; at += step) {
    const int64_t count = least(step, end[kRows - 1] - at);
    for (int64_t k = 0; k < count; k += kGroup) {
      score_group<kVectors>(block, at + k, tile, call.head_dim, scores + k * kRows);
    }
    if (call.softcap > 0) cap_scores<kVectors>(call.softcap, scores, count);
    if (call.attn_bias) {
      for (int v = 0; v < kVectors; ++v) {
        if (call.bias_element == Element::fp32) {
          add_bias<kVectors, float>(call, task.head, block, tile, v, scores, at, count);
        } else {
          add_bias<kVectors, uint16_t>(call, task.head, block, tile, v, scores, at, count);
        }
      }
    }
    if (call.shared_qk) set_own_scores<kVectors>(block, tile, scores, at, count);
    const int64_t all_from = most(at, least(first[kRows - 1], at + count));  // seen by every lane
    const int64_t all_to = most(all_from, least(end[0], at + count));
    hide<kVectors>(scores, at, at, all_from, first, end);
    hide<kVectors>(scores, at, all_to, at + count, first, end);
    Vector shrink[kVectors];
    soften<kVectors>(scores, count, tile, shrink);
    for (int64_t c = 0; c < call.head_dim; c += kGroup) {
      weigh_group<kVectors>(block.values + at * block.width + c, block.width, scores, count, shrink,
                            tile.sums + c * kRows);
    }
    if (!block.finite) add_not_finite<kVectors, Number>(call, task, block, tile, scores, at, count, first, end);
  }
}

// All queries of `rows`. False: they need more floats of scratch than `most_floats`, or there is no memory, and nothing
// was written.
template <int kVectors, typename Number>
bool attend_rows_by(const Call& call, const Rows& rows, int64_t most_floats) {
  constexpr int kRows = kVectors * kLanes;
  const Interval span{visible_interval(call.window, rows.first, call.length).first,
                      visible_interval(call.window, rows.end - 1, call.length).end};
  const int64_t tiles = (rows.end - rows.first + kRows - 1) / kRows;
  const Plan plan(call, span.end - span.first, kRows);
  if (plan.floats(tiles) > most_floats) return false;
  const Scratch memory(static_cast<size_t>(plan.floats(tiles)));
  if (!memory.data()) return false;
  float* scores = memory.data();
  Block block;
  block.panel = plan.panel;
  block.width = plan.width;
  block.keys = scores + plan.scores();
  block.values = block.keys + plan.keys();
  block.rank = reinterpret_cast<int32_t*>(block.values + plan.values());
  block.position = block.rank + plan.integers();
  float* state = reinterpret_cast<float*>(block.position + plan.integers());
  const Decay decay(call, state + tiles * plan.tile);

  for (int64_t from = span.first / plan.block_rows * plan.block_rows; from < span.end; from += plan.block_rows) {
    block.first = most(from, span.first);
    block.end = least(from + plan.block_rows, span.end);
    copy_block<Number>(call, rows, block);
    const int64_t centre = from + plan.block_rows / 2;  // the same however the sequence is cut into tasks
    if (decay.rates) decay.scale_keys(block, centre);
    for (int64_t i = 0; i < tiles; ++i) {
      Tile tile = tile_at(plan, state, rows, i);
      const int64_t first = visible_interval(call.window, tile.first, call.length).first;
      const int64_t end = visible_interval(call.window, tile.first + tile.count - 1, call.length).end;
      if (end <= block.first) continue;  // it is done
      if (first >= block.end) break;     // its keys, and all later ones', are still to come
      if (first >= block.first) begin_tile<kVectors, Number>(call, rows, tile, plan.width);
      prefetch_rows<Number>(call.query, call, rows, tile.first + kRows, kRows);
      if (end <= block.end) prefetch_rows<Number>(call.output, call, rows, tile.first, tile.count);
      Tile seen = tile;
      if (decay.rates) seen.query = decay.scaled<kVectors>(tile, centre);
      attend<kVectors, Number>(call, rows, block, seen, scores);
      if (end <= block.end) end_tile<kVectors, Number>(call, rows, tile);
    }
  }
  return true;
}

bool attend_rows(const Call& call, const Rows& rows, int64_t most_floats) {
  // A tile computes all keys that any of its queries sees: with few keys, small tiles waste less. With few queries they
  // waste less too.
  const Window& window = call.window;
  const int64_t reach = backward_reach(window) + forward_reach(window);
  const bool wide = (!window.exact_windowsize || reach > kNarrowReach) && call.length > kNarrow * kLanes;
  if (call.element == Element::fp32) {
    return (wide ? attend_rows_by<kWide, float> : attend_rows_by<kNarrow, float>)(call, rows, most_floats);
  }
  return (wide ? attend_rows_by<kWide, uint16_t> : attend_rows_by<kNarrow, uint16_t>)(call, rows, most_floats);
}
