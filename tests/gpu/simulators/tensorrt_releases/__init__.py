"""NVIDIA's own Python bindings of TensorRT, release by release, on the libraries of TensorRT-RTX.

NVIDIA publishes the bindings of every release as small wheels, without the libraries they link to. TensorRT-RTX's
libraries have what they need: under the names of TensorRT's they serve them, without a GPU.

What this proves: the Python API of a release, which is names, signatures, enumerations, flags and the module
`tensorrt.plugin`, fits what this package passes and reads; and parsing and building go through, by TensorRT-RTX's
parser and builder. What it does not: that release's own parser and builder, and running an engine.

A process holds the bindings of one release: `run` starts one for each program of this folder.
"""
