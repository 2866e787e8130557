"""Write and check bundles: a folder or tar with everything a device needs to run a model and check its results."""
