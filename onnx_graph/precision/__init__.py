"""Passes that change the element types in which a graph computes."""
