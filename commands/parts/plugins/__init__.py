"""Define the options --plugin, --plugin-library and --backend, and what they ask for."""
