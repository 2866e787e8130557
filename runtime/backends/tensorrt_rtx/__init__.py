"""TensorRT-RTX: what differs from TensorRT, whose folder has the rest."""
