"""From a checkpoint on disk to its weights and a complete configuration."""
