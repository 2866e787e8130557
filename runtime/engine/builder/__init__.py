"""Engines out of ONNX files: TensorRT on the device, TensorRT-RTX anywhere."""
