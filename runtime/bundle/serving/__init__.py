"""Hold files that a bundle brings into a Triton server; they never import this package."""
