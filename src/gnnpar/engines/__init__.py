"""The ways to run an epoch."""
