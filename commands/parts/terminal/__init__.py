"""Show the command line on a terminal: its help, the current stage, and what to type next."""
