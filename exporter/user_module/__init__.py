"""Export a user's own module that contains upstream's layers."""
