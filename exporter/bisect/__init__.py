"""Where a file first leaves the model it was exported from, and why."""
