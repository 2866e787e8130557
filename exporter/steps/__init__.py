"""Modules that compute a few tokens at a time and hand their state to the next call."""
