"""Ahead-of-time plugins for the attention node: TensorRT stores the PTX in the engine, which then needs no library.

The interface is TensorRT's `tensorrt.plugin` (quickly deployable plugins); it exists in TensorRT only, not in
TensorRT-RTX.

Nothing here has run on a GPU yet: docs/status.md says how each part is known.
"""
