"""One device: the whole graph, the oracle of every other method."""
