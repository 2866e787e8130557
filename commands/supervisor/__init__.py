"""Supervise the command line: a small parent process outlives whatever happens to the work."""
