"""The kinds of cases."""
