"""Planner: from a model, a graph and a topology to a Plan with predicted time and memory. It runs no training."""
