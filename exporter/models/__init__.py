"""Supported models, one folder per family."""
