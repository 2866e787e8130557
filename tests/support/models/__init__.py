"""Small models and files that tests run."""
