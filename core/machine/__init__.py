"""This machine: its processor, its memory, processes on it."""
