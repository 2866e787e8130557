// Element types and shapes as TensorRT tells them to a plugin.
#pragma once

#include "kernels/kernels.h"

#include <NvInferRuntime.h>

#include <cstdint>
#include <string>
#include <vector>

namespace localattn {

// False of a type that no kernel computes.
bool elementOf(nvinfer1::DataType type, Element& element);

// "[2, 100, 64]".
std::string shapeText(nvinfer1::Dims const& shape);

// Whether a shape is the wanted one; sizes not known yet (-1) fit.
bool fits(nvinfer1::Dims const& shape, std::vector<int64_t> const& wanted);

}  // namespace localattn
