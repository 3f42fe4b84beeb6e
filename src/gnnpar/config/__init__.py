"""Hydra: composing settings, its application, sweeps, studies. Nothing else drives it."""
