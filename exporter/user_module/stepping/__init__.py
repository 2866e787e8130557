"""A module of the user's own a few tokens at a time: its captured graph, operator by operator along time."""
