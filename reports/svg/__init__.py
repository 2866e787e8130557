"""Draw charts in SVG."""
