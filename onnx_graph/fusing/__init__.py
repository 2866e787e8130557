"""Passes that replace what a traced model computes between products and attention by nodes of `core.nodes.fused`."""
