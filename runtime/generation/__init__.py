"""Step files: their state between calls, and text made with them."""
