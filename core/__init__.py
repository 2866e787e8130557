"""Share definitions with every other part: geometry, the node, configuration, sidecar, errors.

Nothing here imports torch, onnxruntime or another part of the package.
"""
