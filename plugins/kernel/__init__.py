"""Define the attention kernel: its source and variants, ahead-of-time compilation, and launch.

Nothing here has run on a GPU yet: docs/status.md says how each part is known.
Importing this package or `spec`, `targets` and `tiles` imports neither torch nor Triton.
"""
