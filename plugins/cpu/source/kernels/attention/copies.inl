// Between tensors and scratch memory: keys and values in, queries in and outputs out, transposed and converted on the
// way. Included once per instruction set, inside its namespace.

constexpr int64_t kAhead = 16;  // rows that are asked for before they are copied

// Prefetches a row: the rows of one head are too far apart for the hardware prefetcher.
template <typename Number>
inline void prefetch_row(const Number* row, int64_t count) {
  for (int64_t c = 0; c < count; c += 64 / static_cast<int64_t>(sizeof(Number))) __builtin_prefetch(row + c);
}

// Prefetches lines that are needed soon, little by little while a tile computes: a processor can wait for about a dozen
// lines at a time and stalls on more.
struct Ahead {
  // Lines that follow each other: a row's, or those of all rows where no gap is between them.
  struct Part {
    const char* run;  // the next to ask for
    int64_t runs;     // still to come
    int64_t stride;   // from one to the next, in bytes
    int64_t lines;    // of a run
  };
  Part parts[4];    // the next queries, keys and values, and this tile's outputs
  int64_t at_once;  // lines a call
  int part;
  const char* line;  // the next of a run
  int64_t left;      // of its lines

  void go_on() {
    for (int64_t some = at_once; some > 0;) {
      if (left == 0 && !begin_run()) return;
      const int64_t now = least(some, left);
      for (int64_t i = 0; i < now; ++i) __builtin_prefetch(line + 64 * i, 0, 2);
      line += 64 * now;
      left -= now;
      some -= now;
    }
  }

 private:
  bool begin_run() {
    while (part < 4 && parts[part].runs <= 0) ++part;
    if (part == 4) return false;
    Part& from = parts[part];
    line = from.run;
    left = from.lines;
    from.run += from.stride;
    --from.runs;
    return true;
  }
};

// For one tile that computes `calls` groups.
template <typename Number>
inline Ahead ahead_of(const Call& call, const Rows& rows, const Tile& tile, int64_t next_key, int64_t count,
                      int64_t calls) {
  const int64_t size = sizeof(Number), bytes = call.head_dim * size;
  const auto part = [&](const void* tensor, const Layout& layout, int64_t origin, int64_t row, int64_t rows_to_come) {
    const char* run = static_cast<const char*>(tensor) + (origin + row * layout.row) * size;
    if (layout.row == call.head_dim) return Ahead::Part{run, rows_to_come > 0, 0, divide_up(rows_to_come * bytes, 64)};
    return Ahead::Part{run, rows_to_come, layout.row * size, divide_up(bytes, 64)};
  };
  const int64_t next_query = tile.first + count, keys = least(count, call.length - next_key);
  const int64_t origin = rows.origin(call), key_origin = rows.key_origin(call);
  Ahead ahead{};
  ahead.parts[0] = part(call.key, call.key_layout, key_origin, next_key, keys);
  ahead.parts[1] = part(call.value, call.key_layout, key_origin, next_key, keys);
  ahead.parts[2] = part(call.query, call.layout, origin, next_query, least(count, rows.end - next_query));
  ahead.parts[3] = part(call.output, call.layout, origin, tile.first, tile.count);
  ahead.at_once = divide_up(4 * count * divide_up(bytes, 64), most(calls, 1)) + 1;
  return ahead;
}

// Whether the keys and values from a position to `limit` can be taken from the tensors: rows that lie as in a block,
// with as many of any content behind them as the last group may reach into.
template <typename Number>
inline bool fits_in_place(const Call& call, const Rows& rows, int64_t limit) {
  if (sizeof(Number) != sizeof(float) || call.key_mask || call.xpos_scale_base != 0) return false;
  if (call.head_dim != kDepth || call.key_layout.row != kDepth) return false;
  const int64_t all = call.batch * call.kv_heads * call.length * kDepth;
  return rows.key_origin(call) + (limit + kPadding) * kDepth <= all;
}

// An empty block from `first` to at most `limit`.
template <typename Number>
inline void begin_block(const Call& call, const Rows& rows, Block& block, int64_t first, int64_t limit) {
  block.first = block.end = first;
  block.kept = 0;
  block.finite = true;
  block.masked = call.key_mask != nullptr;
  if (block.masked) block.rank[0] = 0;
  block.in_place = fits_in_place<Number>(call, rows, limit);
  block.keys = block.own_keys;
  block.values = block.own_values;
  if (!block.in_place) return;
  block.keys = static_cast<const float*>(call.key) + rows.key_origin(call) + first * kDepth;
  block.values = static_cast<const float*>(call.value) + rows.key_origin(call) + first * kDepth;
}

// Positions [from, end) of keys and values, appended to a block's own. Values that are not finite become zeros: a
// weight of zero would not hide them. `add_not_finite` looks them up.
template <typename Number>
void copy_rows(const Call& call, const Rows& rows, Block& block, int64_t from, int64_t end) {
  const Number* keys = static_cast<const Number*>(call.key) + rows.key_origin(call);
  const Number* values = static_cast<const Number*>(call.value) + rows.key_origin(call);
  const uint8_t* mask = call.key_mask ? call.key_mask + rows.batch * call.length : nullptr;
  const int64_t before = block.kept;
  for (int64_t at = from; at < end; ++at) {
    const int64_t soon = least(at + kAhead, call.length - 1) * call.key_layout.row;
    prefetch_row(keys + soon, call.head_dim);
    prefetch_row(values + soon, call.head_dim);
    if (mask) {
      block.rank[at + 1 - block.first] = static_cast<int32_t>(block.kept + (mask[at] != 0));
      if (!mask[at]) continue;
      block.position[block.kept] = static_cast<int32_t>(at - block.first);
    }
    for (int64_t c = 0; c < call.head_dim; c += kDepth) {
      copy_row(block.own_keys + c / kDepth * block.panel + block.kept * kDepth, keys + at * call.key_layout.row + c,
               least(kDepth, call.head_dim - c), 0);
    }
    copy_row(block.own_values + block.kept * block.width, values + at * call.key_layout.row, call.head_dim,
             block.width);
    ++block.kept;
  }
  float* copied = block.own_values + before * block.width;
  const int64_t floats = (block.kept - before) * block.width;
  if (all_finite(copied, floats)) return;
  block.finite = false;
  for (int64_t i = 0; i < floats; i += kLanes) {
    const Vector value = load(copied + i);
    store(copied + i, value * 0.0f == 0.0f ? value : Vector{});
  }
}

// A block goes on up to position `end`.
template <typename Number>
void extend_block(const Call& call, const Rows& rows, Block& block, int64_t end) {
  if (end <= block.end) return;
  if (block.in_place && !all_finite(block.values + (block.end - block.first) * kDepth, (end - block.end) * kDepth)) {
    block.in_place = false;
    block.kept = 0;
    block.keys = block.own_keys;
    block.values = block.own_values;
    copy_rows<Number>(call, rows, block, block.first, block.end);
  }
  if (block.in_place) {
    block.kept += end - block.end;
  } else {
    copy_rows<Number>(call, rows, block, block.end, end);
  }
  block.end = end;
}

// Queries of a tile, transposed and scaled; the state, but for its sums, in which it has seen no key.
template <int kVectors, typename Number>
void begin_tile(const Call& call, const Rows& rows, Tile& tile) {
  constexpr int kRows = kVectors * kLanes;
  const Number* queries = static_cast<const Number*>(call.query) + rows.origin(call) + tile.first * call.layout.row;
  const float factor = query_factor(call);
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
  // A sink is a score that was seen before all keys; NaN stays NaN.
  float sink = call.sinks ? call.sinks[rows.head] * kLog2e : kBelowScores;
  if (sink < kBelowScores) sink = kBelowScores;
  Windows windows(call.window, tile.first);
  for (int64_t lane = 0; lane < kRows; ++lane) {
    const Interval seen = windows.visible(call.window, tile.first + least(lane, tile.count - 1), call.length);
    tile.seen[lane] = seen.first;
    tile.seen[kRows + lane] = seen.end;
    tile.top[lane] = sink;
    tile.total[lane] = call.sinks ? 1 : 0;
  }
}

// What sums are multiplied by, given the weights' sums: nothing is seen where that is 0.
inline Vector factor_of(Vector totals) { return 1.0f / (totals > 0.0f ? totals : splat(1.0f)); }

// The tile's sums, divided by the weights', into the output.
template <int kVectors, typename Number>
void end_tile(const Call& call, const Rows& rows, const Tile& tile, int64_t width) {
  Number* output = static_cast<Number*>(call.output) + rows.origin(call) + tile.first * call.layout.row;
  const float* sums = tile.sums;
  for (int64_t row = 0; row < tile.count; ++row, output += call.layout.row, sums += width) {
    const Vector factor = splat(1.0f / (tile.total[row] > 0.0f ? tile.total[row] : 1.0f));
    int64_t c = 0;
    for (; c + kLanes <= call.head_dim; c += kLanes) store_elements(output + c, load(sums + c) * factor);
    if (c < call.head_dim) store_some(output + c, load(sums + c) * factor, call.head_dim - c);
  }
}
