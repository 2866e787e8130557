"""Compiled libraries and programs that tests build."""
