"""Where numbers go: trackers receive flat dictionaries and know nothing else."""
