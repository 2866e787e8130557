"""Rewrite models into standard operators only, for runtimes that do not support functions."""
