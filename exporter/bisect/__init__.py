"""Find the first place where a file differs from the model it was exported from, and the likely cause."""
