"""The attention node as ahead-of-time plugin: TensorRT puts the PTX into the engine, which then needs no plugin.

The interface is TensorRT's `tensorrt.plugin` (quickly deployable plugins); it exists in TensorRT only, not in
TensorRT-RTX.
"""
