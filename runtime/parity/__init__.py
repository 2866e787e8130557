"""Compare a model with a reference: runners, the inputs that they share, the comparison, and its report."""
