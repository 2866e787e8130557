"""Define the functions at the package's root, `localattn.export` and others; the commands call the same ones."""
