"""Define the options --plugin, --plugin-library and --backend, and act on them."""
