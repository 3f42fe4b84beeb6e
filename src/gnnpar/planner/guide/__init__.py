"""A graph network that looks at model, graph and topology, and says which choices a tree search should try first."""
