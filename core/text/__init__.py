"""Text that ships with the package: what calibrates rounded weights, what judges files, what ranks embeddings."""
