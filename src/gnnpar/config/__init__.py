"""Hydra: composing settings, sweeps, studies. Nothing else drives it."""
