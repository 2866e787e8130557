"""The node's kernels for onnxruntime on the CPU: C++ in `source/`, compiled into a library of custom operators."""
