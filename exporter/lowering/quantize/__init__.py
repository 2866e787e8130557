"""Matrices of linear layers in fewer bits: dynamic int8, or int4 in blocks."""
