"""Export of a user's own module with upstream's layers in it."""
