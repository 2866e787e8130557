// The operators of fused.h, for whatever vectors `vectors.inl` has. Included once per instruction set, inside its
// namespace.

// Columns whose sums fit into registers beside a vector of the row.
constexpr int kColumns = 6;

inline Vector magnitude(Vector x) { return x < 0.0f ? -x : x; }

// tanh |x| = (1 - e) / (1 + e) with e = exp(-2|x|); absolute error below 1.5e-7.
LOCALATTN_INLINE Vector tanh_of(Vector x) {
  const Vector e = exp2_of(magnitude(x) * -2.885390082f);  // -2 / log 2
  const Vector y = (1.0f - e) / (1.0f + e);
  return x < 0.0f ? -y : y;
}

// x·Φ(x), Φ the normal distribution: Φ(-|x|) = erfc(z)/2 with z = |x|/√2, and erfc(z) = exp(-z²)·t·p(t) with
// t = 1/(1 + 0.43 z), the form of Abramowitz & Stegun 7.1.26; p of least relative error on [0, 9.3] (8e-8), fitted
// here. Absolute error of Φ below 3e-7.
LOCALATTN_INLINE Vector gelu_of(Vector x) {
  const Vector t = 1.0f / (1.0f + magnitude(x) * 0.304055916f);  // 0.43 / √2
  Vector p = splat(0x1.2de808p-4f) * t - 0x1.3dd230p-2f;
  p = p * t + 0x1.88e996p-2f;
  p = p * t - 0x1.5f1ff0p-4f;
  p = p * t + 0x1.f9890ap-3f;
  p = p * t + 0x1.a3bd92p-3f;
  p = p * t + 0x1.f47b16p-3f;
  p = p * t + 0x1.f0ab80p-3f;
  const Vector tail = exp2_of(x * x * -0.7213475204f) * (p * t * 0.5f);  // -1 / (2 log 2)
  return x * (x > 0.0f ? 1.0f - tail : tail);
}

// 1 / (1 + e^-x); relative error below 4e-7.
LOCALATTN_INLINE Vector sigmoid_of(Vector x) {
  const Vector power = exp2_of(magnitude(x) * -1.442695041f);  // -1 / log 2
  const Vector large = 1.0f / (1.0f + power);
  return x > 0.0f ? large : power * large;
}

LOCALATTN_INLINE Vector silu_of(Vector x) { return x * sigmoid_of(x); }

// x/2 · (1 + tanh(√(2/π) · (x + 0.044715 x³))), with (1 + tanh u) / 2 = sigmoid(2u).
LOCALATTN_INLINE Vector gelu_tanh_of(Vector x) { return x * sigmoid_of(x * (x * x * 0.0713548163f + 1.595769122f)); }

// The lanes of every vector added up: sums[i] of parts[i], for kLanes of them.
inline void add_lanes(const Vector* parts, float* sums) {
  Vector rows[kLanes];
  LOCALATTN_UNROLL
  for (int i = 0; i < kLanes; ++i) rows[i] = parts[i];
  store(sums, fold_lanes<kLanes>(rows));
}

// What a token's loops prefetch while they compute: nothing, or the lines of the next token, little by little. A core
// can wait for about two dozen lines at a time and stalls on more, so prefetching all lines at once gained nothing.
struct Nothing {
  void go_on() {}
};
struct NextToken {
  struct Part {
    const float* at;
    int64_t left;
  };
  Part parts[3];
  int part;

  void go_on() {
    while (part < 3 && parts[part].left <= 0) ++part;
    if (part == 3) return;
    __builtin_prefetch(parts[part].at);
    parts[part].at += 16;
    parts[part].left -= 16;
  }
};

// The products of a row with kCount columns, a vector each that is still to be added up.
template <int kCount, typename Soon>
inline void multiply_columns(const float* row, const float* columns, int64_t width, int64_t dim, Vector* parts,
                             Soon& soon) {
  Vector sums[kCount] = {};
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    const Vector x = load_elements(row + c);
    soon.go_on();
    if constexpr (kLanes > 8) soon.go_on();
    LOCALATTN_UNROLL
    for (int j = 0; j < kCount; ++j) sums[j] += x * load(columns + j * width + c);
  }
  if (c < dim) {
    const Vector x = load_some(row + c, dim - c);
    LOCALATTN_UNROLL
    for (int j = 0; j < kCount; ++j) sums[j] += x * load(columns + j * width + c);
  }
  for (int j = 0; j < kCount; ++j) parts[j] = sums[j];
}

template <typename Soon>
inline void multiply_some(int count, const float* row, const float* columns, int64_t width, int64_t dim, Vector* parts,
                          Soon& soon) {
  switch (count) {
    case 1: return multiply_columns<1>(row, columns, width, dim, parts, soon);
    case 2: return multiply_columns<2>(row, columns, width, dim, parts, soon);
    case 3: return multiply_columns<3>(row, columns, width, dim, parts, soon);
    case 4: return multiply_columns<4>(row, columns, width, dim, parts, soon);
    case 5: return multiply_columns<5>(row, columns, width, dim, parts, soon);
    default: return multiply_columns<kColumns>(row, columns, width, dim, parts, soon);
  }
}

inline Vector sum_of_squares(const float* row, int64_t dim) {
  Vector sums[4] = {};
  int64_t c = 0;
  for (; c + 4 * kLanes <= dim; c += 4 * kLanes) {
    LOCALATTN_UNROLL
    for (int i = 0; i < 4; ++i) {
      const Vector x = load_elements(row + c + i * kLanes);
      sums[i] += x * x;
    }
  }
  for (; c < dim; c += kLanes) {
    const Vector x = load_some(row + c, least(kLanes, dim - c));
    sums[0] += x * x;
  }
  return (sums[0] + sums[1]) + (sums[2] + sums[3]);
}

// Streams at a time: their sums share vectors; more streams would only need more memory.
constexpr int64_t kStreams = 8;

// The memory of `weights_of`.
inline int64_t weights_floats(int64_t count) {
  const int64_t together = least(count, kStreams), sums = align(together * (count + 3), kLanes);
  return sums * kLanes + sums + align(together * (count + 2), kLanes);
}

// What streams [first, end) of a token are multiplied with: 2 + count weights each. `memory` holds `weights_floats`.
template <typename Soon>
inline const float* weights_of(const ReadStreams& call, const float* streams, int64_t first, int64_t end, float* memory,
                               Soon& soon) {
  const int64_t columns = call.count + 2, a_stream = columns + 1;
  const int64_t sums = align((end - first) * a_stream, kLanes), weights = (end - first) * columns;
  float* parts = memory;
  float* totals = parts + sums * kLanes;
  float* found = totals + sums;
  for (int64_t s = 0; s < end - first; ++s) {
    Vector* part = reinterpret_cast<Vector*>(parts) + s * a_stream;
    const float* row = streams + (first + s) * call.dim;
    for (int64_t j = 0; j < columns; j += kColumns) {
      const int some = static_cast<int>(least(kColumns, columns - j));
      multiply_some(some, row, call.columns + j * call.width, call.width, call.dim, part + j, soon);
    }
    part[columns] = sum_of_squares(row, call.dim);
  }
  for (int64_t i = 0; i < sums; i += kLanes) add_lanes(reinterpret_cast<const Vector*>(parts) + i, totals + i);
  for (int64_t s = 0; s < end - first; ++s) {
    const float* total = totals + s * a_stream;
    const float norm = std::sqrt(total[columns]);
    const float scale = 1.0f / (norm < 1e-12f ? 1e-12f : norm);
    for (int64_t j = 0; j < columns; ++j) found[s * columns + j] = total[j] * scale;
  }
  for (int64_t i = 0; i < weights; i += kLanes) {
    const int64_t some = least(kLanes, weights - i);
    const int64_t at = first * columns + i;
    store(found + i, tanh_of(load(found + i)) * load_some(call.gain + at, some) + load_some(call.constant + at, some));
  }
  return found;
}

// Σ_s weights[s]·streams[s], one row of kCount streams (0: any number).
template <int kCount>
inline void combine(const float* streams, const float* weights, int64_t any, int64_t dim, float* to) {
  const int64_t count = kCount ? kCount : any;
  Vector own[kCount ? kCount : 1];
  for (int s = 0; s < kCount; ++s) own[s] = splat(weights[s]);
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    Vector sum = {};
    LOCALATTN_UNROLL
    for (int s = 0; s < kCount; ++s) sum += load_elements(streams + s * dim + c) * own[s];
    for (int64_t s = kCount; s < count; ++s) sum += load_elements(streams + s * dim + c) * weights[s];
    store_elements(to + c, sum);
  }
  if (c == dim) return;
  Vector sum = {};
  for (int64_t s = 0; s < count; ++s) sum += load_some(streams + s * dim + c, dim - c) * weights[s];
  store_some(to + c, sum, dim - c);
}

// A row less its mean, over the root of its variance and 1e-5, in place; it stays in the first cache.
inline void normalize(const ReadStreams& call, float* row) {
  const int64_t whole = call.dim / kLanes * kLanes, some = call.dim - whole;
  Vector sum = {};
  for (int64_t c = 0; c < whole; c += kLanes) sum += load_elements(row + c);
  if (some) sum += load_some(row + whole, some);
  const float mean = add_up(sum) / static_cast<float>(call.dim);
  Vector squares = {};
  for (int64_t c = 0; c < whole; c += kLanes) {
    const Vector x = load_elements(row + c) - mean;
    squares += x * x;
  }
  float rest = 0.0f;
  for (int64_t c = whole; c < call.dim; ++c) rest += (row[c] - mean) * (row[c] - mean);
  const float factor = 1.0f / std::sqrt((add_up(squares) + rest) / static_cast<float>(call.dim) + 1e-5f);
  for (int64_t c = 0; c < whole; c += kLanes) {
    const Vector x = (load_elements(row + c) - mean) * factor;
    store_elements(row + c, x * load_elements(call.scale + c) + load_elements(call.shift + c));
  }
  for (int64_t c = whole; c < call.dim; ++c) row[c] = (row[c] - mean) * factor * call.scale[c] + call.shift[c];
}

// The memory of `read_row`.
inline int64_t read_floats(int64_t count) { return weights_floats(count) + count; }

// One token; `memory` holds `read_floats`, zeros at first: padding is added up with the rest, and has to be numbers.
template <typename Soon>
inline void read_row(const ReadStreams& call, int64_t row, float* memory, Soon& soon) {
  const int64_t count = call.count, columns = count + 2;
  float* first_weights = memory + weights_floats(count);  // of every stream
  const float* streams = call.streams + row * count * call.dim;
  for (int64_t first = 0; first < count; first += kStreams) {
    const int64_t end = least(first + kStreams, count);
    const float* own = weights_of(call, streams, first, end, memory, soon);
    for (int64_t s = first; s < end; ++s, own += columns) {
      first_weights[s] = own[0];
      std::memcpy(call.mix + (row * count + s) * count, own + 1, static_cast<size_t>(count) * sizeof(float));
      call.beta[row * count + s] = own[count + 1];
    }
  }
  float* read = call.read + row * call.dim;
  if (count == 4) {
    combine<4>(streams, first_weights, count, call.dim, read);
  } else {
    combine<0>(streams, first_weights, count, call.dim, read);
  }
  if (call.scale) normalize(call, read);
}

bool read_streams(const ReadStreams& call, Range rows) {
  const size_t floats = static_cast<size_t>(read_floats(call.count));
  const Scratch scratch(floats);
  if (!scratch.data()) return false;
  std::memset(scratch.data(), 0, floats * sizeof(float));
  Nothing soon;
  for (int64_t row = rows.first; row < rows.end; ++row) read_row(call, row, scratch.data(), soon);
  return true;
}

// One token of kFrom streams that become kTo (0: any number); kWhole: a vector of channels, else the first `some`.
template <int kFrom, int kTo, bool kWhole, typename Soon>
inline void write_vector(const WriteStreams& call, int64_t row, const float* mix, const float* beta, int64_t c,
                         int64_t some, Soon& soon) {
  const int64_t from = kFrom ? kFrom : call.from, to = kTo ? kTo : call.to;
  const auto at = [&](const float* data) { return kWhole ? load_elements(data) : load_some(data, some); };
  const float* streams = call.streams + row * from * call.dim + c;
  const Vector y = at(call.output + row * call.dim + c);
  soon.go_on();
  Vector kept[kFrom ? kFrom : 1];
  for (int s = 0; s < kFrom; ++s) kept[s] = at(streams + s * call.dim);
  const auto write = [&](int64_t t) {
    Vector sum = y * beta[t];
    if (mix) {
      LOCALATTN_UNROLL
      for (int s = 0; s < kFrom; ++s) sum += kept[s] * mix[s * to + t];
      for (int64_t s = kFrom; s < from; ++s) sum += at(streams + s * call.dim) * mix[s * to + t];
    } else {
      sum += at(streams + t * call.dim);
    }
    float* written = call.written + (row * to + t) * call.dim + c;
    if (kWhole) {
      store_elements(written, sum);
    } else {
      store_some(written, sum, some);
    }
  };
  LOCALATTN_UNROLL
  for (int t = 0; t < kTo; ++t) write(t);
  for (int64_t t = kTo; t < to; ++t) write(t);
}

// The weights of the streams' sum: Σ_t mix[s, t] for every s, and then Σ_t beta[t].
inline void sum_weights(const float* mix, const float* beta, int64_t from, int64_t to, float* summed) {
  for (int64_t s = 0; s <= from; ++s) {
    const float* weights = s < from ? mix + s * to : beta;
    summed[s] = 0.0f;
    for (int64_t t = 0; t < to; ++t) summed[s] += weights[t];
  }
}

template <int kFrom, int kTo, typename Soon>
inline void write_rows(WriteStreams call, Range rows, float* summed, Soon& soon) {
  const int64_t weights = call.from * call.to;
  for (int64_t row = rows.first; row < rows.end; ++row) {
    const float* mix = call.mix ? call.mix + row * weights : nullptr;
    const float* beta = call.beta + row * call.to;
    if (call.adds_up) {
      sum_weights(mix, beta, call.from, call.to, summed);
      mix = summed;
      beta = summed + call.from;
    }
    int64_t c = 0;
    for (; c + kLanes <= call.dim; c += kLanes) write_vector<kFrom, kTo, true>(call, row, mix, beta, c, kLanes, soon);
    if (c < call.dim) write_vector<kFrom, kTo, false>(call, row, mix, beta, c, call.dim - c, soon);
  }
}

bool write_streams(const WriteStreams& call, Range rows) {
  const Scratch scratch(static_cast<size_t>(call.from + 1));
  float* summed = scratch.data();
  if (!summed) return false;
  Nothing soon;
  if (call.adds_up) {
    call.from == 4 ? write_rows<4, 1>(call, rows, summed, soon) : write_rows<0, 1>(call, rows, summed, soon);
  } else if (call.from == 4 && call.to == 4) {
    write_rows<4, 4>(call, rows, summed, soon);
  } else {
    write_rows<0, 0>(call, rows, summed, soon);
  }
  return true;
}

// A token is read as soon as it is written, while the next one's lines are being prefetched: writing mostly waits for
// memory, and reading mostly computes.
bool write_and_read_streams(const WriteStreams& writing, const ReadStreams& reading, Range rows) {
  const size_t floats = static_cast<size_t>(read_floats(reading.count));
  const Scratch scratch(floats);
  if (!scratch.data()) return false;
  std::memset(scratch.data(), 0, floats * sizeof(float));
  const int64_t dim = writing.dim, width = writing.from * dim;
  for (int64_t row = rows.first; row < rows.end; ++row) {
    const int64_t next = row + 1;
    NextToken soon{{{writing.streams + next * width, width},
                    {writing.written + next * width, width},
                    {writing.output + next * dim, dim}},
                   next < rows.end ? 0 : 3};
    if (writing.from == 4) {
      write_rows<4, 4>(writing, {row, row + 1}, nullptr, soon);
    } else {
      write_rows<0, 0>(writing, {row, row + 1}, nullptr, soon);
    }
    read_row(reading, row, scratch.data(), soon);
  }
  return true;
}

template <typename Number>
inline void rotate_halves(const Number* x, const Number* cosine, const Number* sine, Number* to, int64_t half) {
  for (int64_t c = 0; c < half; c += kLanes) {
    const int64_t some = least(kLanes, half - c);
    const auto at = [&](const Number* from) { return some == kLanes ? load_elements(from) : load_some(from, some); };
    const Vector low = at(x + c), high = at(x + half + c);
    const Vector turned_low = low * at(cosine + c) + high * at(sine + c);
    const Vector turned_high = high * at(cosine + half + c) + low * at(sine + half + c);
    if (some == kLanes) {
      store_elements(to + c, turned_low);
      store_elements(to + half + c, turned_high);
    } else {
      store_some(to + c, turned_low, some);
      store_some(to + half + c, turned_high, some);
    }
  }
}

template <typename Number>
inline void rotate_pairs(const Number* x, const Number* cosine, const Number* sine, Number* to, int64_t dim) {
  int64_t c = 0;
  for (; c + kLanes <= dim; c += kLanes) {
    const Vector own = load_elements(x + c);
    const Vector turned = swap_neighbours(own) * load_elements(sine + c);
    store_elements(to + c, own * load_elements(cosine + c) + turned);
  }
  if (c == dim) return;
  const int64_t some = dim - c;
  const Vector own = load_some(x + c, some);
  store_some(to + c, own * load_some(cosine + c, some) + swap_neighbours(own) * load_some(sine + c, some), some);
}

template <typename Number>
inline void rotate_rows(const Rotate& call, Range rows) {
  for (int64_t row = rows.first; row < rows.end; ++row) {
    const int64_t sequence = call.rows_a_sequence ? row / call.rows_a_sequence : 0;
    const int64_t position = row / call.rows_a_position % call.positions + sequence * call.positions;
    const Number* x = static_cast<const Number*>(call.x) + row * call.dim;
    const Number* cosine = static_cast<const Number*>(call.cosine) + position * call.dim;
    const Number* sine = static_cast<const Number*>(call.sine) + position * call.dim;
    Number* to = static_cast<Number*>(call.rotated) + row * call.dim;
    if (call.pairs) {
      rotate_pairs(x, cosine, sine, to, call.dim);
    } else {
      rotate_halves(x, cosine, sine, to, call.dim / 2);
    }
  }
}

bool rotate(const Rotate& call, Range rows) {
  if (call.element == Element::fp32) {
    rotate_rows<float>(call, rows);
  } else {
    rotate_rows<uint16_t>(call, rows);
  }
  return true;
}

template <Vector (*kActivation)(Vector), typename Number>
inline void gate_elements(const Gated& call, Range elements) {
  const Number* value = static_cast<const Number*>(call.value);
  const Number* gate = static_cast<const Number*>(call.gate);
  Number* output = static_cast<Number*>(call.output);
  int64_t i = elements.first;
  for (; i + kLanes <= elements.end; i += kLanes) {
    store_elements(output + i, load_elements(value + i) * kActivation(load_elements(gate + i)));
  }
  if (i == elements.end) return;
  const int64_t some = elements.end - i;
  store_some(output + i, load_some(value + i, some) * kActivation(load_some(gate + i, some)), some);
}

template <typename Number>
inline void gate_by(const Gated& call, Range elements) {
  switch (call.activation) {
    case Activation::gelu: return gate_elements<gelu_of, Number>(call, elements);
    case Activation::gelu_tanh: return gate_elements<gelu_tanh_of, Number>(call, elements);
    case Activation::silu: return gate_elements<silu_of, Number>(call, elements);
  }
}

bool gated(const Gated& call, Range elements) {
  if (call.element == Element::fp32) {
    gate_by<float>(call, elements);
  } else {
    gate_by<uint16_t>(call, elements);
  }
  return true;
}
