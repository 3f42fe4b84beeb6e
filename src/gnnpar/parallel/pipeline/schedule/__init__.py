"""Schedules of a pipeline as data: generated, lowered, validated, printed and simulated before anything runs."""
