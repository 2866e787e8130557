#include "tensorrt/shapes.h"

namespace localattn {

using nvinfer1::DataType;
using nvinfer1::Dims;

namespace {

bool fits(int64_t a, int64_t b) { return a < 0 || b < 0 || a == b; }

}  // namespace

bool elementOf(DataType type, Element& element) {
  switch (type) {
    case DataType::kHALF: element = Element::kFP16; return true;
    case DataType::kBF16: element = Element::kBF16; return true;
    case DataType::kFLOAT: element = Element::kFP32; return true;
    case DataType::kFP8: element = Element::kFP8; return true;
    default: return false;
  }
}

std::string shapeText(Dims const& shape) {
  std::string text = "[";
  for (int32_t i = 0; i < shape.nbDims; ++i) {
    text += (i != 0 ? ", " : "") + std::to_string(shape.d[i]);
  }
  return text + "]";
}

bool fits(Dims const& shape, std::vector<int64_t> const& wanted) {
  if (shape.nbDims != static_cast<int32_t>(wanted.size())) {
    return false;
  }
  for (int32_t i = 0; i < shape.nbDims; ++i) {
    if (!fits(shape.d[i], wanted[i])) {
      return false;
    }
  }
  return true;
}

}  // namespace localattn
