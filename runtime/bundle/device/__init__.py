"""The scripts that travel in a bundle: they need neither torch nor localattn there; the package uses them too."""
