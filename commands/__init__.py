"""One file per verb of the command line; imports at the top stay light."""
