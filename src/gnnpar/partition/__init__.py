"""Partitioners, chunks, a rank's shard, and shards on disk."""
