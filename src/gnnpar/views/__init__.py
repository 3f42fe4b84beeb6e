"""Implementations of the Graph Protocol: what a strategy makes of one aggregation."""
