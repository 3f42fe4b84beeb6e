"""Chunkers: assign nodes to chunks of their part. Chunks are cut inside each part of a partition.

GNNPipe (Chen et al., arXiv 2308.10087) cuts K chunks first and makes each part a run of chunk numbers, which is a poor
partition: on Reddit two such parts exchange 53 % more rows than two METIS parts. Here the nodes are cut into P parts
first and each part into its chunks: K chunks in all, K/P per part.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from gnnpar.data.dataset import Dataset
from gnnpar.files import JsonDict
from gnnpar.partition.partition import cached, fields_of, metis

_NODE_WEIGHT = 50  # GNNPipe's weight of a node: 50 + in-degree


class Chunker(Protocol):
    """A chunker of parts. A frozen dataclass; fields are YAML keys."""

    def assign(self, graph: Dataset, part_of: Tensor, chunks_per_part: int, seed: int) -> Tensor:
        """Return the chunk of every node, numbered inside its part, int64 [N]. ValueError for an empty chunk."""
        ...


class _PartByPart(ABC):
    """A chunker that cuts every part separately."""

    def assign(self, graph: Dataset, part_of: Tensor, chunks_per_part: int, seed: int) -> Tensor:
        edge_index, chunks = graph.edge_index, chunks_per_part
        if chunks < 1:
            raise ValueError(f"{chunks} chunks a part: at least one is needed")
        chunk_of = torch.zeros(graph.num_nodes, dtype=torch.int64)
        parts = int(part_of.max()) + 1 if graph.num_nodes else 0
        inner = part_of[edge_index[0]] == part_of[edge_index[1]]
        local_of = torch.empty_like(chunk_of)
        for part in range(parts):
            ids = (part_of == part).nonzero().flatten()
            if chunks > len(ids):
                raise ValueError(
                    f"part {part} of {parts} has {len(ids)} nodes and cannot fill {chunks} chunks: "
                    f"use at most {len(ids) * parts} chunks in all, or fewer parts."
                )
            if chunks == 1:
                continue
            local_of[ids] = torch.arange(len(ids))
            edges = local_of[edge_index[:, inner & (part_of[edge_index[1]] == part)]]
            chunk_of[ids] = mine = self._cut(edges, graph.in_degree[ids], chunks, seed + part)
            if empty := (torch.bincount(mine, minlength=chunks) == 0).nonzero().flatten().tolist():
                raise ValueError(
                    f"{len(empty)} of {chunks} chunks of part {part} of {parts} have no nodes (chunks {empty[:8]}; "
                    f"{len(ids)} nodes): use fewer chunks, or strategy.chunking=range."
                )
        return chunk_of

    @abstractmethod
    def _cut(self, edges: Tensor, degree: Tensor, chunks: int, seed: int) -> Tensor:
        """Return the chunk of each node of a part, [n]. Shapes: edges inside it [2, e], in-degrees of the graph [n]."""


@dataclass(frozen=True, kw_only=True)
class Balanced(_PartByPart):
    """GNNPipe's chunker: METIS into `fold` K pieces of equal weight 50 + degree, shuffled by the seed, `fold` of them
    merged into a chunk. It cuts more edges to get chunks of equal cost."""

    fold: int = 4

    def _cut(self, edges: Tensor, degree: Tensor, chunks: int, seed: int) -> Tensor:
        num_nodes, weight = len(degree), (_NODE_WEIGHT + degree).numpy()
        pieces = metis(edges, num_nodes, min(self.fold * chunks, num_nodes), seed=seed, weight=weight)
        used, piece_of = torch.unique(pieces, return_inverse=True)  # METIS leaves pieces of tiny graphs empty
        order = torch.randperm(len(used), generator=torch.Generator().manual_seed(seed))
        return (order * chunks // len(used))[piece_of]


@dataclass(frozen=True, kw_only=True)
class Metis(_PartByPart):
    """METIS into K chunks with equal numbers of nodes: the smallest cut, unequal costs."""

    def _cut(self, edges: Tensor, degree: Tensor, chunks: int, seed: int) -> Tensor:
        return metis(edges, len(degree), chunks, seed=seed)


@dataclass(frozen=True, kw_only=True)
class Range(_PartByPart):
    """Consecutive nodes of a part in equal numbers."""

    def _cut(self, edges: Tensor, degree: Tensor, chunks: int, seed: int) -> Tensor:
        return torch.arange(len(degree)) * chunks // max(1, len(degree))


def chunk(
    dataset: Dataset,
    part_of: Tensor,
    chunks_per_part: int,
    *,
    by: Chunker,
    seed: int = 0,
    cache: Path | None = None,
    say: Callable[[str], None] = lambda _: None,
) -> Tensor:
    """Return the chunks, from the cache if possible. int64 [N]."""

    def key() -> list[object]:
        parts = hashlib.sha256(part_of.to(torch.int64).numpy().tobytes()).hexdigest()
        named = f"chunks/{type(by).__qualname__}"
        return [dataset.graph_hash, parts, chunks_per_part, named, fields_of(by), seed]

    make = partial(by.assign, dataset, part_of, chunks_per_part, seed)
    done = f"cut {dataset.num_nodes} nodes into chunks, {chunks_per_part} a part, in"
    return cached(cache, by, key, dataset.num_nodes, chunks_per_part, "chunking", say, make, done)


def quotient(edge_index: Tensor, chunk_of: Tensor, chunks: int) -> Tensor:
    """Return the numbers of edges into chunk i (row) from chunk j (column), int64 [K, K]."""
    src, dst = chunk_of[edge_index]
    return torch.bincount(dst * chunks + src, minlength=chunks * chunks).view(chunks, chunks)


def chunk_statistics(edge_index: Tensor, part_of: Tensor, chunk_of: Tensor) -> JsonDict:
    """Return the costs of a chunking: sizes and imbalance of chunks over all parts, and rho, the share of cross-chunk
    edges. Edges between parts count as cross-chunk unless their chunks have the same number: such chunks are computed
    in the same slot and read each other's current rows. Imbalance: largest over mean."""
    chunks = int(chunk_of.max()) + 1 if len(chunk_of) else 1
    parts = int(part_of.max()) + 1 if len(part_of) else 1
    piece_of = part_of * chunks + chunk_of
    nodes = torch.bincount(piece_of, minlength=parts * chunks)
    edges = torch.bincount(piece_of[edge_index[1]], minlength=parts * chunks)
    between = quotient(edge_index, chunk_of, chunks)
    crossing = int(between.sum() - between.diagonal().sum())
    return {
        "chunks": parts * chunks,
        "chunk_nodes_min": int(nodes.min()),
        "chunk_nodes_max": int(nodes.max()),
        "chunk_edges_min": int(edges.min()),
        "chunk_edges_max": int(edges.max()),
        "chunk_node_imbalance": float(nodes.max() / nodes.double().mean()),
        "chunk_edge_imbalance": float(edges.max() / edges.double().mean()) if edges.any() else 1.0,
        "rho": crossing / max(1, edge_index.shape[1]),
    }
