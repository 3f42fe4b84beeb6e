"""What one rank holds of the dataset: partitioning, and cutting shards along a partition."""
