"""Checkpoints: files, policy and resuming."""
