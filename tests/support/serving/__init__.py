"""A real Triton server, a client for it, and a stand-in for its onnxruntime backend."""
