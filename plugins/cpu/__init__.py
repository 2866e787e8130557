"""Kernels of the attention node and the fused nodes for onnxruntime on the CPU: C++ in `source/`, one library."""
