"""A model at one choice of shapes: what is traced, checked and compared."""
