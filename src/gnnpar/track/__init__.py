"""Trackers, which receive flat dictionaries of metrics."""
