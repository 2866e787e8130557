"""Supported models, one folder a family."""
