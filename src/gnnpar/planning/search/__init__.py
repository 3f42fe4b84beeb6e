"""Searches over candidates: grids by enumeration, stages by dynamic programming, knobs by descent, the rest by trees."""
