"""The nodes of this package as ONNX functions: attention, fused and step nodes in standard operators."""
