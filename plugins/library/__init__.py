"""Build and load the C++ plugin library: an IPluginV3 that contains kernels, for TensorRT 10.3 to 11 and TensorRT-RTX.

`source/` holds its C++: `kernels/` chooses and launches a kernel, `tensorrt/` is what TensorRT sees. `build` compiles
it with the kernels that a model, or every model, needs; `sidecar` describes one; `registry` loads it and lists the
plugins in it.

Nothing here has run on a GPU yet: docs/status.md says how each part is known.
"""
