"""Comparison with other implementations of local attention."""
