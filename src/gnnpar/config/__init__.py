"""Configuration by Hydra: composing settings, its application, sweeps, studies. No other package uses Hydra."""
