"""From a checkpoint to a checked ONNX file: what knows torch and the ONNX exporter."""
