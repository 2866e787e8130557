"""Export-friendly, static-shape versions of the upstream modules: one file per upstream class."""
