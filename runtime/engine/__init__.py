"""TensorRT engines: built, opened, run."""
