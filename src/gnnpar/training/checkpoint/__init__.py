"""Checkpoints: what is saved, when, and how a run goes on."""
