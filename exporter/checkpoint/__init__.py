"""Read a checkpoint from disk: its weights and a complete configuration."""
