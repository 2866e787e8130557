"""Written files: what they hold, how they are published."""
