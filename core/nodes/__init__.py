"""Contracts of the custom nodes: names, inputs, attributes."""
