"""ONNX files read, checked and rewritten; needs `onnx` and nothing that runs them."""
