"""Definitions that every other part shares: geometry, the node, configuration, sidecar, errors.

Nothing here imports torch, onnxruntime or another part of the package.
"""
