#include "tensorrt/ring_plan.h"

#include <algorithm>

namespace localattn {
namespace {

constexpr int64_t kSPAN_UNIT = 64;
constexpr int64_t kPROGRAMS = 264;
constexpr int64_t kLEAST_SPAN = 256;
constexpr int64_t kSPLIT_FROM = 1024;
// Rows of a program are at most so many.
constexpr int64_t kMOST_ROWS = 64;

int64_t divideUp(int64_t a, int64_t b) { return (a + b - 1) / b; }

int64_t mostSplits(RingSizes const& sizes) { return sizes.keys() >= kSPLIT_FROM ? sizes.keys() / kLEAST_SPAN : 1; }

}  // namespace

RingPlan planOf(RingSizes const& sizes, int64_t blockRows) {
  int64_t const blocks = divideUp(sizes.rows(), blockRows);
  int64_t const wanted = std::min(divideUp(kPROGRAMS, blocks * sizes.groups()), mostSplits(sizes));
  int64_t const span = divideUp(sizes.keys(), wanted * kSPAN_UNIT) * kSPAN_UNIT;
  int64_t const splits = divideUp(sizes.keys(), span);
  return {span, splits, blocks * splits};
}

int64_t mostPartBytes(RingSizes const& sizes) {
  int64_t const most = mostSplits(sizes);
  if (most == 1) {
    return 0;
  }
  int64_t const rows = sizes.rows() * sizes.groups();
  return std::min(rows * most, kPROGRAMS * kMOST_ROWS + rows) * (sizes.headDim + 2) * 4;
}

}  // namespace localattn
