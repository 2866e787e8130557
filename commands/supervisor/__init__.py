"""Supervise the command line from a small parent process that survives any crash."""
