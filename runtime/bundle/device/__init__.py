"""The two scripts that travel in a bundle: no torch and no localattn where they run; the package uses them too."""
