"""Inputs of a file: read, drawn, checked."""
