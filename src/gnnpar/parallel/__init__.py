"""Strategies: one folder for each method, and the modules that several methods share."""
