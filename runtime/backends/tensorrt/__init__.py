"""TensorRT engines: built, opened, run.

Nothing here has run on a GPU yet: docs/status.md says how each part is known.
"""
