"""The checks that a written file must pass before an export succeeds: one file per check."""
