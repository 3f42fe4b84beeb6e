"""Feature parallelism: every rank folds all edges on its share of the columns or heads."""
