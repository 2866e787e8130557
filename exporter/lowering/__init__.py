"""Trace models to ONNX, and define this package's nodes as ONNX functions in standard operators."""
