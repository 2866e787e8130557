"""What a written file must pass before an export ends well: one file per check."""
