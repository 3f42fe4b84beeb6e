"""Checkpoints: files, when they are written, and resuming."""
