"""Store matrices of linear layers in fewer bits: dynamic int8, int4 in blocks, fp8 or int8 for TensorRT."""
