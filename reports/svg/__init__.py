"""Charts in SVG."""
