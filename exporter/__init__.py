"""Export a checkpoint to a checked ONNX file: the part of the package that uses torch and its ONNX exporter."""
