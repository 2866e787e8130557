"""Report what is on this machine, what each command can do with it, and how to add the rest."""
