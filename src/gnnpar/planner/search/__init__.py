"""Searches over candidates: enumeration of grids, dynamic programming over stages, product spaces by evaluations."""
