"""How each family of operators is computed position by position: one file a family, one table (`table.py`)."""
