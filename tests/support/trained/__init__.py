"""Trained language models small enough for every run: their weights, and the script that trains them."""
