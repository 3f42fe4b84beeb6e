"""GNNs, one small file each, written against `gnnpar.graph.Graph` alone."""
