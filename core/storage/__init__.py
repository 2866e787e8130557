"""Read files, write files whole or not at all, and keep libraries between runs."""
