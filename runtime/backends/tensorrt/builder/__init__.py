"""Build engines from ONNX files: TensorRT on the device, TensorRT-RTX on any machine."""
