"""Bundles: a folder or tar with everything a device needs to run a model and to check its results there."""
