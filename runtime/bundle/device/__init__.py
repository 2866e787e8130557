"""Hold the scripts that are copied into bundles and need neither torch nor localattn; the package uses them too."""
