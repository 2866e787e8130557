"""Runtimes that run exported files, one folder each with the same few files, and a row in `registry.py`."""
