"""Mini-batches of sampled neighbourhoods."""
