"""Check a written file before an export succeeds; one module per check."""
