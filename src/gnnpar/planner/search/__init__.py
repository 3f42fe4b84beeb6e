"""Searches over candidates: grids by enumeration, stages by dynamic programming, product spaces by evaluations."""
