"""Rewrite models into standard operators alone, for runtimes that support no functions."""
