"""What runs inside a Triton server: files that a bundle carries there, which never import this package."""
