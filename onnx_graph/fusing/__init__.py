"""Passes: name what a traced model computes between products and attention by the nodes of `core.nodes.fused`."""
