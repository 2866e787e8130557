"""Inputs of a file: read, drawn at random, checked."""
