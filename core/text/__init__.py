"""Text that ships with the package: to calibrate rounded weights, to compare files, to rank embeddings."""
