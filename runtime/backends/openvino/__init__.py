"""OpenVINO as a runtime for ONNX files."""
