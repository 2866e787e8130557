"""`LocalMHA`: windowed self-attention with its projections."""
