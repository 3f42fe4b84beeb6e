"""Guide: a graph network that reads model, graph and topology, and ranks the choices of a tree search."""
