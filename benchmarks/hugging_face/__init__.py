"""A Hugging Face model at the size of a real one, beside the files that other exporters make of it."""
