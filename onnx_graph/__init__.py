"""Read, check and rewrite ONNX files; needs `onnx` and nothing that runs them."""
