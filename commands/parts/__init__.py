"""Hold what commands share, and parts of the long commands."""
