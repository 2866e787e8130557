"""Sessions in onnxruntime."""
