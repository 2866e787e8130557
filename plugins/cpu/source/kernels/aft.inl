// AFT-local for whatever vectors `vectors.inl` has. Included once per instruction set, inside its namespace.
//
// A few rows are products of their biases' exponents with the keys': e^(w - r) · e^(k - M), where r is the row's
// largest bias and M the channel's largest key among all that the tile's rows see. If a row's own largest logit is so
// far below r + M that its sum of weights lost digits, or if a later key made it NaN, the row is computed again, key by
// key, with its own maximum: the sum itself tells.

// Rows of a product, and vectors of channels; both sums of all fit into registers.
constexpr int kMeanRows = 6;
#if defined(__aarch64__)
constexpr int kMeanVectors = 2;
#else
constexpr int kMeanVectors = kLanes == 16 ? 2 : 1;
#endif
// Weights below 2^-126 are lost: beside a sum of 2^-72 they are nothing.
constexpr float kSoundSum = 0x1p-72f;
// core/nodes/aft.py: LOWEST_KEY.
constexpr float kLowestKey = -1e29f;

// Largest logit, Σ e^(logit - top)·value, Σ e^(logit - top).
struct MeanState {
  Vector top, num, den;
};

LOCALATTN_INLINE Vector exp_of(Vector x) { return exp2_of(x * kLog2e); }

inline MeanState merged(const MeanState& a, const MeanState& b) {
  const Vector top = larger(a.top, b.top);
  const Vector x = exp_of(a.top - top), y = exp_of(b.top - top);
  return {top, a.num * x + b.num * y, a.den * x + b.den * y};
}

inline MeanState load_state(const float* from, int64_t width) {
  return {load(from), load(from + width), load(from + 2 * width)};
}
inline void store_state(float* to, int64_t width, const MeanState& state) {
  store(to, state.top);
  store(to + width, state.num);
  store(to + 2 * width, state.den);
}

// Some channels of one sequence.
struct MeanChannels {
  const Aft& call;
  int64_t sequence, first, count;  // count ≤ kLanes, may be 0

  int64_t at(int64_t row) const { return (row * call.batch + sequence) * call.dim + first; }
  Vector load_row(const float* tensor, int64_t row) const {
    return count == kLanes ? load_elements(tensor + at(row)) : load_some(tensor + at(row), count);
  }
  Vector load_key(int64_t row) const { return larger(splat(kLowestKey), load_row(call.key, row)); }
  bool hidden(int64_t row) const { return call.mask && !call.mask[sequence * call.length + row]; }
  MeanState state(int64_t block, bool ahead) const {
    return load_state(call.state(block, ahead, sequence) + first, call.width());
  }
};

inline MeanChannels mean_channels(const Aft& call, int64_t sequence, int64_t first) {
  return {call, sequence, first < call.dim ? first : 0, most(least(kLanes, call.dim - first), 0)};
}

// The states of kLanes channels: of the keys before every block, and of those from it on.
inline void mean_states(const Aft& call, int64_t sequence, int64_t first) {
  const MeanChannels channels = mean_channels(call, sequence, first);
  const int64_t blocks = call.blocks(), width = call.width();
  const auto place = [&](int64_t block, bool ahead) { return call.state(block, ahead, sequence) + first; };
  const MeanState none{splat(kBelowScores), Vector{}, Vector{}};
  for (int64_t block = 0; block < blocks; ++block) {
    const int64_t begin = block * kAftBlock, end = least(begin + kAftBlock, call.length);
    MeanState own = none;
    for (int64_t j = begin; j < end; ++j) {
      if (!channels.hidden(j)) own.top = larger(channels.load_key(j), own.top);
    }
    for (int64_t j = begin; j < end; ++j) {
      if (channels.hidden(j)) continue;
      const Vector weight = exp_of(channels.load_key(j) - own.top);
      own.num += weight * channels.load_row(call.value, j);
      own.den += weight;
    }
    store_state(place(block, false), width, own);
  }
  if (!call.causal) {
    MeanState ahead = none;
    store_state(place(blocks, true), width, ahead);
    for (int64_t block = blocks - 1; block >= 0; --block) {
      ahead = merged(load_state(place(block, false), width), ahead);
      store_state(place(block, true), width, ahead);
    }
  }
  MeanState before = none;
  for (int64_t block = 0; block < blocks; ++block) {
    const MeanState own = load_state(place(block, false), width);
    store_state(place(block, false), width, before);
    before = merged(before, own);
  }
  store_state(place(blocks, false), width, before);
}

bool aft_states(const Aft& call, Range parts) {
  const int64_t each = call.width() / kAftChannels;
  for (int64_t part = parts.first; part < parts.end; ++part) {
    for (int64_t c = 0; c < kAftChannels; c += kLanes) {
      mean_states(call, part / each, part % each * kAftChannels + c);
    }
  }
  return true;
}

// What all channels of a tile of rows share.
struct MeanTile {
  int64_t first, end;  // rows
  int64_t low, high;   // keys that are looked at one by one: multiples of kAftBlock, or the sequence's end
  int64_t stride;      // floats from one row's weights to the next
  float* weights;      // [rows][stride]: e^(w - r) of the keys that its group of rows looks at
  float* outside;      // [rows]: e^-r, the weight of a key without a bias

  int64_t group_low(const Aft& call, int64_t row) const { return most(row - call.reach, low); }
  int64_t group_high(const Aft& call, int64_t row) const {
    return least(row + kMeanRows + (call.causal ? 0 : call.reach), high);
  }
};

// The biases of a row: those of keys [first, end) begin at `from`.
struct RowBiases {
  int64_t first, end;
  const float* from;

  RowBiases(const Aft& call, int64_t row)
      : first(most(row - call.reach, 0)),
        end(least(row + (call.causal ? 0 : call.reach) + 1, call.length)),
        from(call.bias + row * call.columns + first - (row - call.reach)) {}
};

inline void weigh_rows(const Aft& call, MeanTile& tile) {
  for (int64_t group = tile.first; group < tile.end; group += kMeanRows) {
    const int64_t low = tile.group_low(call, group), high = tile.group_high(call, group);
    for (int64_t i = 0; i < kMeanRows; ++i) {
      const int64_t row = least(group + i, tile.end - 1);  // rows past the end repeat the last one
      const RowBiases biases(call, row);
      float top = 0.0f;
      for (int64_t j = 0; j < biases.end - biases.first; ++j) top = biases.from[j] > top ? biases.from[j] : top;
      float* to = tile.weights + (group - tile.first + i) * tile.stride;
      const float outside = exp_of(splat(-top))[0];
      tile.outside[group - tile.first + i] = outside;
      int64_t j = low;
      for (; j < biases.first; ++j) to[j - low] = outside;
      for (; j < biases.end; j += kLanes) {
        const int64_t some = least(kLanes, biases.end - j);
        store_elements(to + (j - low), exp_of(load_some(biases.from + (j - biases.first), some) - splat(top)));
      }
      for (j = biases.end; j < high; ++j) to[j - low] = call.causal ? 0.0f : outside;
    }
  }
}

// One row by itself, key by key: as the definition says, with its own largest logit.
inline Vector careful_mean(const MeanChannels& channels, const MeanTile& tile, int64_t row) {
  const Aft& call = channels.call;
  const RowBiases biases(call, row);
  const int64_t end = call.causal ? row + 1 : tile.high;
  MeanState sums = channels.state(tile.low / kAftBlock, false);
  if (!call.causal) sums = merged(sums, channels.state(divide_up(tile.high, kAftBlock), true));
  // Relative to the largest key: beside a key of 1e29 a bias would be lost.
  Vector peak = sums.top;
  for (int64_t j = tile.low; j < end; ++j) {
    if (!channels.hidden(j)) peak = larger(channels.load_key(j), peak);
  }
  const auto logit = [&](int64_t j) {
    const Vector key = channels.load_key(j) - peak;
    return j >= biases.first && j < biases.end ? key + biases.from[j - biases.first] : key;
  };
  sums.top -= peak;
  MeanState own{sums.top, Vector{}, Vector{}};
  for (int64_t j = tile.low; j < end; ++j) {
    if (!channels.hidden(j)) own.top = larger(logit(j), own.top);
  }
  own = merged(own, sums);
  for (int64_t j = tile.low; j < end; ++j) {
    if (channels.hidden(j)) continue;
    const Vector weight = exp_of(logit(j) - own.top);
    own.num += weight * channels.load_row(call.value, j);
    own.den += weight;
  }
  return own.num / (own.den == 0.0f ? splat(1.0f) : own.den);
}

inline void store_mean(const MeanChannels& channels, int64_t row, Vector mean) {
  const Aft& call = channels.call;
  const Vector gate = channels.load_row(call.gate, row);
  // σ(x) = 1 / (1 + e^-x), and e^x / (1 + e^x) below 0, where e^-x may be infinite.
  const Vector small = exp_of(gate > 0.0f ? -gate : gate);
  const Vector sigmoid = (gate > 0.0f ? splat(1.0f) : small) / (1.0f + small);
  float* to = call.output + channels.at(row);
  if (channels.count == kLanes) {
    store_elements(to, mean * sigmoid);
  } else {
    store_some(to, mean * sigmoid, channels.count);
  }
}

inline bool any_lane(Integers wrong) {
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= wrong[i];
  return any != 0;
}

// kMeanVectors vectors of channels of one sequence. Their sums are of weights, then of values times weights.
constexpr int kSums = 2 * kMeanVectors;
constexpr int kSumsFloats = kSums * kLanes;

// For every key of the tile, its weights e^(k - M) and the values times these, into `keys`; the sums of the keys before
// the tile, and of those behind it.
LOCALATTN_INLINE void lay_keys(const Aft& call, const MeanTile& tile, int64_t sequence, int64_t first, float* keys,
                               Vector* before, Vector* behind) {
  const MeanState none{splat(kBelowScores), Vector{}, Vector{}};
  for (int v = 0; v < kMeanVectors; ++v) {
    const MeanChannels channels = mean_channels(call, sequence, first + v * kLanes);
    const int64_t ahead_at = divide_up(tile.high, kAftBlock);
    MeanState far = load_state(call.state(tile.low / kAftBlock, false, sequence) + first + v * kLanes, call.width());
    MeanState later = none;
    if (!call.causal) later = load_state(call.state(ahead_at, true, sequence) + first + v * kLanes, call.width());
    Vector top = larger(later.top, far.top);
    for (int64_t j = tile.low; j < tile.high; ++j) {
      if (!channels.hidden(j)) top = larger(channels.load_key(j), top);
    }
    for (int64_t j = tile.low; j < tile.high; ++j) {
      float* to = keys + (j - tile.low) * kSumsFloats + v * kLanes;
      const bool hidden = channels.hidden(j);
      const Vector weight = hidden ? Vector{} : exp_of(channels.load_key(j) - top);
      store(to, weight);
      store(to + kMeanVectors * kLanes, hidden ? Vector{} : weight * channels.load_row(call.value, j));
    }
    const Vector x = exp_of(far.top - top), y = exp_of(later.top - top);
    before[v] = far.den * x;
    before[kMeanVectors + v] = far.num * x;
    behind[v] = later.den * y;
    behind[kMeanVectors + v] = later.num * y;
  }
}

// Adds keys [low, high) of the tile to the sums.
LOCALATTN_INLINE void add_keys(const MeanTile& tile, const float* keys, int64_t low, int64_t high, Vector* sums) {
  for (int64_t j = low; j < high; ++j) {
    for (int i = 0; i < kSums; ++i) sums[i] += load(keys + (j - tile.low) * kSumsFloats + i * kLanes);
  }
}

// The sums of what lies ahead of each group of rows, from the last group to the first.
LOCALATTN_INLINE void sum_ahead(const Aft& call, const MeanTile& tile, const float* keys, int64_t groups,
                                Vector* behind, float* ahead) {
  int64_t high = tile.high;
  for (int64_t group = groups - 1; group >= 0; --group) {
    const int64_t end = tile.group_high(call, tile.first + group * kMeanRows);
    add_keys(tile, keys, end, high, behind);
    high = end;
    for (int i = 0; i < kSums; ++i) store(ahead + group * kSumsFloats + i * kLanes, behind[i]);
  }
}

// The means of `count` rows from `row` on, of one vector of channels, whose sums are in their column `v`.
LOCALATTN_INLINE void store_means(const MeanChannels& channels, const MeanTile& tile, int64_t row, int64_t count, int v,
                                  const Vector (*den)[kMeanVectors], const Vector (*num)[kMeanVectors]) {
  if (channels.count == 0) return;
  Integers wrong = {};
  for (int i = 0; i < count; ++i) {
    wrong |= ~((den[i][v] > kSoundSum) & (num[i][v] * 0.0f == 0.0f));
  }
  if (any_lane(wrong)) {
    for (int i = 0; i < count; ++i) store_mean(channels, row + i, careful_mean(channels, tile, row + i));
  } else {
    for (int i = 0; i < count; ++i) store_mean(channels, row + i, num[i][v] / den[i][v]);
  }
}

// Rows of a tile. `keys` and `ahead` are memory for what `lay_keys` and `sum_ahead` write.
inline void mean_rows(const Aft& call, const MeanTile& tile, int64_t sequence, int64_t first, float* keys,
                      float* ahead) {
  Vector before[kSums], behind[kSums];
  lay_keys(call, tile, sequence, first, keys, before, behind);
  const int64_t groups = divide_up(tile.end - tile.first, kMeanRows);
  if (!call.causal) sum_ahead(call, tile, keys, groups, behind, ahead);
  int64_t added = tile.low;
  for (int64_t group = 0; group < groups; ++group) {
    const int64_t row = tile.first + group * kMeanRows;
    const int64_t low = tile.group_low(call, row), high = tile.group_high(call, row);
    add_keys(tile, keys, added, low, before);
    added = low;
    const float* weights = tile.weights + group * kMeanRows * tile.stride;
    const float* outside = tile.outside + group * kMeanRows;
    Vector den[kMeanRows][kMeanVectors], num[kMeanRows][kMeanVectors];
    for (int v = 0; v < kMeanVectors; ++v) {
      Vector far_den = before[v], far_num = before[kMeanVectors + v];
      if (!call.causal) {
        far_den += load(ahead + group * kSumsFloats + v * kLanes);
        far_num += load(ahead + group * kSumsFloats + (kMeanVectors + v) * kLanes);
      }
      LOCALATTN_UNROLL
      for (int i = 0; i < kMeanRows; ++i) {
        den[i][v] = far_den * outside[i];
        num[i][v] = far_num * outside[i];
      }
    }
    for (int64_t j = low; j < high; ++j) {
      const float* at = keys + (j - tile.low) * kSumsFloats;
      LOCALATTN_UNROLL
      for (int i = 0; i < kMeanRows; ++i) {
        const Vector weight = splat(weights[i * tile.stride + (j - low)]);
        LOCALATTN_UNROLL
        for (int v = 0; v < kMeanVectors; ++v) {
          den[i][v] += weight * load(at + v * kLanes);
          num[i][v] += weight * load(at + (kMeanVectors + v) * kLanes);
        }
      }
    }
    const int64_t count = least(kMeanRows, tile.end - row);
    for (int v = 0; v < kMeanVectors; ++v) {
      store_means(mean_channels(call, sequence, first + v * kLanes), tile, row, count, v, den, num);
    }
  }
}

bool aft_mean(const Aft& call, const AftPart& part) {
  MeanTile tile{};
  tile.first = part.first;
  tile.end = least(part.first + kAftRows, call.length);
  tile.low = most(tile.first - call.reach, 0) / kAftBlock * kAftBlock;
  tile.high = call.causal ? tile.end : least(align(tile.end + call.reach, kAftBlock), call.length);
  const int64_t rows = align(tile.end - tile.first, kMeanRows), span = tile.high - tile.low;
  // Rows of weights end with room for a whole vector.
  tile.stride = align(least(2 * call.reach + kMeanRows, span) + kLanes, kMostLanes);
  const int64_t weights = rows * tile.stride, outside = align(rows, kMostLanes), keys = span * kSumsFloats;
  const Scratch scratch(static_cast<size_t>(weights + outside + keys + rows / kMeanRows * kSumsFloats));
  if (!scratch.data()) return false;
  tile.weights = scratch.data();
  tile.outside = tile.weights + weights;
  float* at_keys = tile.outside + outside;
  weigh_rows(call, tile);
  const int64_t each = call.width() / kAftChannels;
  for (int64_t index = part.parts.first; index < part.parts.end; ++index) {
    for (int64_t c = 0; c < kAftChannels; c += kMeanVectors * kLanes) {
      const int64_t first = index % each * kAftChannels + c;
      if (first < call.dim) mean_rows(call, tile, index / each, first, at_keys, at_keys + keys);
    }
  }
  return true;
}
