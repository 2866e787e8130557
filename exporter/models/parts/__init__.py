"""Modules and functions that several families share."""
