"""Exported files in other people's runtimes and tools."""
