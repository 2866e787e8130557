"""Passes that change the element types that a graph computes in."""
