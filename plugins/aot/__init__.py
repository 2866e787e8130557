"""Ahead-of-time plugins for the attention node: TensorRT stores the PTX in the engine, which then needs no library.

The interface is TensorRT's `tensorrt.plugin` (quickly deployable plugins); it exists in TensorRT only, not in
TensorRT-RTX.
"""
