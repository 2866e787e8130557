"""What is on this machine, what each command could do with it, and what would add the rest."""
