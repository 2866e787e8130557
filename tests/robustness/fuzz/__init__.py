"""Hostile input: seeds, mutations that know the formats, the commands that read them, and what counts as a fault."""
