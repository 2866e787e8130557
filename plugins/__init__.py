"""The windowed attention operator and its implementations."""
