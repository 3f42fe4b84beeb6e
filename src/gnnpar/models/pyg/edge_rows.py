"""Rows of a rank's in-edges: what a model gets in the place of edge_attr, and all that it computes of that."""

from __future__ import annotations

from torch import Tensor


class EdgeRows(Tensor):
    """One row an in-edge of the rank, by ascending edge id: a tensor whose results are marked as it is, so that rows of
    edges are told from rows of nodes, of which there may be as many. Convolutions take the mark off."""

    @staticmethod
    def of(rows: Tensor) -> EdgeRows:
        return rows.as_subclass(EdgeRows)

    def plain(self) -> Tensor:
        """The same without the mark."""
        return self.as_subclass(Tensor)
