"""Run step files: keep their state between calls, and generate text."""
