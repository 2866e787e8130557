"""The attention kernel: its source, its variants, and how it is compiled ahead of time and launched.

Importing this package or `spec`, `targets` and `tiles` imports neither torch nor Triton.
"""
