"""`LocalAttention`: windowed attention of given queries, keys and values."""
