"""Define the verb `convert`; code for forms other than standard operators belongs beside `command.py`."""

from .command import convert

__all__ = ["convert"]
