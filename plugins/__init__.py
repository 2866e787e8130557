"""Implementations of the windowed attention operator."""
