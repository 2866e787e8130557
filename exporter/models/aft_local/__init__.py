"""labml's AFT-local."""
