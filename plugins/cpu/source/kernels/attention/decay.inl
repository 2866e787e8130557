// xpos: products are multiplied by a decay of their channel, 2^(rate (t - s + f w)). Included once per instruction set,
// inside its namespace.
//
// The decay is that of the query times that of the key, both counted from the middle of the key's block, where neither
// overflows: keys are scaled once as they lie in the block, queries for every block that they attend to.

// What a task keeps for it; nothing without xpos.
struct Decay {
  int64_t head_dim;
  int64_t forward;  // reach
  float* rates;     // [head_dim], zeros up to whole vectors; null without xpos
  float* query;     // [head_dim][tile]

  Decay(const Call& call, float* memory) : head_dim(call.head_dim), forward(forward_reach(call.window)) {
    rates = call.xpos_scale_base != 0 ? memory : nullptr;
    query = memory + align(head_dim, kLanes);
    if (!rates) return;
    for (int64_t c = 0; c < align(head_dim, kLanes); ++c) {
      rates[c] = c < head_dim ? static_cast<float>(decay_rate(call, c)) : 0;
    }
  }

  // Rows of the block from `first` on, which were just copied.
  void scale_keys(const Block& block, int64_t first, int64_t centre) const {
    for (int64_t row = first; row < block.kept; ++row) {
      const float distance = static_cast<float>(centre - block.position_of(row));
      for (int64_t c = 0; c < head_dim; c += kLanes) {
        float* key = block.own_keys + c / kDepth * block.panel + row * kDepth + c % kDepth;
        store(key, load(key) * power_of(load(rates + c) * distance));
      }
    }
  }

  // The tile's queries as they meet the keys of a block.
  template <int kVectors>
  float* scaled(const Tile& tile, int64_t centre) const {
    alignas(64) float ahead[kVectors * kLanes];
    for (int lane = 0; lane < kVectors * kLanes; ++lane) {
      ahead[lane] = static_cast<float>(tile.first + lane + forward - centre);
    }
    // Both halves of a head decay alike.
    const int64_t half = head_dim / 2 * kVectors * kLanes;
    for (int64_t c = 0, at = 0; c < head_dim / 2; ++c) {
      for (int v = 0; v < kVectors; ++v, at += kLanes) {
        const Vector factor = power_of(load(ahead + v * kLanes) * rates[c]);
        store(query + at, load(tile.query + at) * factor);
        store(query + half + at, load(tile.query + half + at) * factor);
      }
    }
    return query;
  }
};
