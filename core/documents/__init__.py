"""JSON documents that commands write and read."""
