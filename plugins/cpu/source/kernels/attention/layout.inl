// Where everything lies in a task's scratch memory. Included once per instruction set, inside its namespace.

constexpr int64_t kDepth = 64;  // channels of a key that lie together: keys are panels of [rows][kDepth]
constexpr int64_t kStep = 96;   // keys a tile takes at a time: their scores and values fit into the first level cache
// Rows that a group of keys may reach beyond the last.
constexpr int64_t kPadding = kGroup > kSingle ? kGroup : kSingle;
// A block's keys and values stay in the second level cache: how many floats, what its rows are a multiple of, and how
// many there are at most.
constexpr int64_t kBlockFloats = 65536;
constexpr int64_t kSmallestBlock = 64;
constexpr int64_t kLargestBlock = 512;
constexpr int64_t kFewestRows = 32;  // where no block of that size fits: heads of more than 512 channels
constexpr float kLog2e = 1.44269504088896340736f;
constexpr float kBelowScores = -3e38f;  // where a running maximum starts
constexpr float kHidden = -__builtin_inff();

// What queries are multiplied by: scores then are in units of log 2, or of the cap.
template <typename AnyCall>
inline float query_factor(const AnyCall& call) {
  return call.softcap > 0 ? call.scale / call.softcap : call.scale * kLog2e;
}

inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

// Keys and values [first, end) of a head that the mask keeps, side by side. It grows with the tiles that see it.
struct Block {
  int64_t first, end;
  int64_t kept;         // rows
  int64_t panel;        // floats from one panel of keys to the next
  int64_t width;        // floats of a row of values
  const float* keys;    // [panels][rows][kDepth]
  const float* values;  // [rows][width]; zeros for those that are not finite
  bool in_place;        // both are the tensors' own, which lie like that
  float* own_keys;      // where copies go
  float* own_values;
  bool masked;        // some may be left out
  bool finite;        // all values are
  int32_t* rank;      // with a mask: [end - first + 1], how many rows before this position are kept
  int32_t* position;  // the same: [rows], where a row was, counted from `first`

  int64_t place_of(int64_t at) const { return least(most(at, first), end) - first; }
  int64_t row_at(int64_t at) const { return masked ? rank[place_of(at)] : place_of(at); }
  int64_t position_of(int64_t row) const { return first + (masked ? position[row] : row); }
};

// Queries [first, first + count) of a head; lanes past `count` repeat the last one's interval and are not stored.
struct Tile {
  int64_t first, count;
  float* query;   // [head_dim][tile]
  float* sums;    // [tile][width]
  float* top;     // [tile]: largest score so far
  float* total;   // [tile]: sum of the weights so far
  int64_t* seen;  // [2][tile]: first visible key, and one past the last
};

// Rows of a block of keys under xpos: at its ends the decay is at most 2^±30, whatever the base (ζ ≥ 2/7).
inline int64_t decayed_rows(float base) {
  const float rows = (base < 0 ? -base : base) * 32;
  return rows < kLargestBlock ? most(static_cast<int64_t>(rows) / kGroup * kGroup, kGroup) : kLargestBlock;
}

// How a task's scratch memory is divided; sizes in floats.
struct Plan {
  int64_t tile_rows;   // queries of a tile
  int64_t block_rows;  // positions a block, the same for every task
  int64_t most_rows;   // of them, what this task can need
  int64_t panels;      // of keys
  int64_t panel;
  int64_t width;  // of a row of values
  int64_t query;  // of a tile: its queries, and all it keeps
  int64_t tile;
  int64_t waiting;  // tiles that wait for the next block at a time
  int64_t places;   // for tiles
  int64_t decay;    // for xpos

  Plan(const Call& call, int64_t span, int64_t rows, int64_t tiles) {
    panels = divide_up(call.head_dim, kDepth);
    width = align(call.head_dim, 16);
    const int64_t fitting = kBlockFloats / (panels * kDepth + width) / kSmallestBlock * kSmallestBlock;
    block_rows = least(most(fitting, kFewestRows), kLargestBlock);
    decay = 0;
    if (call.xpos_scale_base != 0) {
      block_rows = least(block_rows, decayed_rows(call.xpos_scale_base));
      decay = align(call.head_dim, kLanes) * (1 + rows);  // rates, and the queries of a tile
    }
    most_rows = least(block_rows, span);
    panel = (most_rows + kPadding) * kDepth;
    tile_rows = rows;
    query = rows * align(call.head_dim, kLanes);
    tile = query + rows * (width + 2 + 4);  // sums, top, total, and two positions of two floats each
    // Those whose queries see keys on both sides of a position.
    waiting = least(tiles, (keys_per_window(call.window) + call.window.window_size) / rows + 3);
    places = least(tiles, waiting + 1);
  }
  int64_t scores() const { return (kStep + kPadding) * tile_rows; }
  int64_t keys() const { return panels * panel; }
  int64_t values() const { return most_rows * width; }
  int64_t integers() const { return align(most_rows + 1, 16); }
  int64_t floats() const { return scores() + keys() + values() + 2 * integers() + places * tile + decay; }
};

// Where a tile's state lies: those that one block is enough for take turns in one place, which stays in the cache.
inline Tile tile_at(const Plan& plan, float* state, const Rows& rows, int64_t index, bool waits) {
  Tile tile;
  tile.first = rows.first + index * plan.tile_rows;
  tile.count = least(plan.tile_rows, rows.end - tile.first);
  const int64_t place = plan.places == plan.waiting ? index : waits ? 1 + index % plan.waiting : 0;
  tile.query = state + place * plan.tile;
  tile.sums = tile.query + plan.query;
  tile.top = tile.sums + plan.tile_rows * plan.width;
  tile.total = tile.top + plan.tile_rows;
  tile.seen = reinterpret_cast<int64_t*>(tile.total + plan.tile_rows);
  return tile;
}
