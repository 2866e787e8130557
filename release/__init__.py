"""Everything that a release publishes, built and checked by one command: `python -m release`."""
