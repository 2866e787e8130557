"""Files that an older release wrote, and what they computed then."""
