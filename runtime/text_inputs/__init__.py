"""Inputs of checks that look like inputs of use: text through the model's own tokenizer, or tokens drawn by rank."""
