// Between tensors and scratch memory: keys and values in, queries in and outputs out, transposed and converted on the
// way. Included once per instruction set, inside its namespace.

constexpr int64_t kAhead = 16;  // rows that are asked for before they are copied

// Asks for a row before it is read: the rows of one head lie too far apart for the processor to foresee the next.
template <typename Number>
inline void prefetch_row(const Number* row, int64_t count) {
  for (int64_t c = 0; c < count; c += 64 / static_cast<int64_t>(sizeof(Number))) __builtin_prefetch(row + c);
}

// The same for `count` rows of a tensor, as far as they belong to the task.
template <typename Number>
inline void prefetch_rows(const void* tensor, const Call& call, const Rows& rows, int64_t first, int64_t count) {
  const Number* data = static_cast<const Number*>(tensor) + rows.origin(call);
  const int64_t end = least(first + count, rows.end);
  for (int64_t row = first; row < end; ++row) prefetch_row(data + row * call.layout.row, call.head_dim);
}

// Fills a block from the tensors; its keys are followed by kGroup rows of zeros, which the last group may reach into.
// Values that are not finite become zeros: a weight of zero would not hide them. `add_not_finite` looks them up.
template <typename Number>
void copy_block(const Call& call, const Rows& rows, Block& block) {
  const Number* keys = static_cast<const Number*>(call.key) + rows.key_origin(call);
  const Number* values = static_cast<const Number*>(call.value) + rows.key_origin(call);
  const uint8_t* mask = call.key_mask ? call.key_mask + rows.batch * call.length : nullptr;
  int32_t kept = 0;
  for (int64_t at = block.first; at < block.end; ++at) {
    block.rank[at - block.first] = kept;
    const int64_t soon = least(at + kAhead, call.length - 1) * call.key_layout.row;
    prefetch_row(keys + soon, call.head_dim);
    prefetch_row(values + soon, call.head_dim);
    if (mask && !mask[at]) continue;
    block.position[kept] = static_cast<int32_t>(at - block.first);
    for (int64_t c = 0; c < call.head_dim; c += kDepth) {
      copy_row(block.keys + c / kDepth * block.panel + kept * kDepth, keys + at * call.key_layout.row + c,
               least(kDepth, call.head_dim - c), 0);
    }
    copy_row(block.values + kept * block.width, values + at * call.key_layout.row, call.head_dim, block.width);
    ++kept;
  }
  block.rank[block.end - block.first] = kept;
  for (int64_t c = 0; c < call.head_dim; c += kDepth) {
    float* padding = block.keys + c / kDepth * block.panel + kept * kDepth;
    for (int64_t i = 0; i < kGroup * kDepth; i += kLanes) store(padding + i, Vector{});
  }
  block.finite = all_finite(block.values, kept * block.width);
  for (int64_t i = 0; !block.finite && i < kept * block.width; i += kLanes) {
    const Vector value = load(block.values + i);
    store(block.values + i, value * 0.0f == 0.0f ? value : Vector{});
  }
}

// Queries of a tile, transposed and scaled; the state in which it has seen no key.
template <int kVectors, typename Number>
void begin_tile(const Call& call, const Rows& rows, Tile& tile, int64_t width) {
  constexpr int kRows = kVectors * kLanes;
  const Number* queries = static_cast<const Number*>(call.query) + rows.origin(call) + tile.first * call.layout.row;
  const float factor = call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2e;
  for (int64_t c = 0; c < call.head_dim; c += kLanes) {
    const int64_t channels = least(kLanes, call.head_dim - c);
    for (int v = 0; v < kVectors; ++v) {
      Vector square[kLanes];
      const Number* from = queries + c;
      if (channels == kLanes && tile.count == kRows) {
        LOCALATTN_UNROLL
        for (int i = 0; i < kLanes; ++i) square[i] = load_elements(from + (v * kLanes + i) * call.layout.row);
      } else {
        for (int i = 0; i < kLanes; ++i) {
          square[i] = load_some(from + least(v * kLanes + i, tile.count - 1) * call.layout.row, channels);
        }
      }
      transpose(square);
      LOCALATTN_UNROLL
      for (int i = 0; i < kLanes; ++i) store(tile.query + ((c + i) * kVectors + v) * kLanes, square[i] * factor);
    }
  }
  for (int64_t i = 0; i < width * kRows; i += kLanes) store(tile.sums + i, Vector{});
  // A sink is a score that was seen before all keys; NaN stays NaN.
  float sink = call.sinks ? call.sinks[rows.head] * kLog2e : kBelowScores;
  if (sink < kBelowScores) sink = kBelowScores;
  for (int64_t lane = 0; lane < kRows; ++lane) {
    const int64_t query = tile.first + least(lane, tile.count - 1);
    const Interval seen = visible_interval(call.window, query, call.length);
    tile.seen[lane] = seen.first;
    tile.seen[kRows + lane] = seen.end;
    tile.top[lane] = sink;
    tile.total[lane] = call.sinks ? 1 : 0;
  }
}

// The tile's sums, divided by the weights' and transposed back, into the output.
template <int kVectors, typename Number>
void end_tile(const Call& call, const Rows& rows, const Tile& tile) {
  constexpr int kRows = kVectors * kLanes;
  Number* output = static_cast<Number*>(call.output) + rows.origin(call) + tile.first * call.layout.row;
  for (int v = 0; v < kVectors; ++v) {
    const Vector total = load(tile.total + v * kLanes);
    const Vector factor = 1.0f / (total > 0.0f ? total : splat(1.0f));
    for (int64_t c = 0; c < call.head_dim; c += kLanes) {
      const int64_t channels = least(kLanes, call.head_dim - c);
      Vector square[kLanes];
      LOCALATTN_UNROLL
      for (int i = 0; i < kLanes; ++i) square[i] = load(tile.sums + ((c + i) * kVectors + v) * kLanes) * factor;
      transpose(square);
      Number* to = output + v * kLanes * call.layout.row + c;
      if (channels == kLanes && tile.count == kRows) {
        LOCALATTN_UNROLL
        for (int i = 0; i < kLanes; ++i) store_elements(to + i * call.layout.row, square[i]);
      } else {
        for (int i = 0; i < least(kLanes, tile.count - v * kLanes); ++i) {
          store_some(to + i * call.layout.row, square[i], channels);
        }
      }
    }
  }
}
