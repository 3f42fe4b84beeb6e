"""Who owns what: partitioners, chunks, a rank's shard, and shards on disk."""
