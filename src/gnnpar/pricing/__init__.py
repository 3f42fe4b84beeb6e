"""What a strategy prices itself with: the traced model, graph statistics, a machine and its rates, as data."""
