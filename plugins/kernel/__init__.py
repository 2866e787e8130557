"""The attention kernel: its source, its variants, and how it is compiled ahead of time and launched.

Nothing here has run on a GPU yet: docs/status.md says how each part is known.
Importing this package or `spec`, `targets` and `tiles` imports neither torch nor Triton.
"""
