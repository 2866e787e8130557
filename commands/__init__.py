"""Hold the command line, one file per verb; imports at the top of these files stay light."""
