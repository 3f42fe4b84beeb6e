"""GNNPipe: layers in stages, nodes in chunks; hybrid has several parts a stage."""
