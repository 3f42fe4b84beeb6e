"""The order of a part's own rows in memory: place rows that read each other close together.

A sum reads a row of features for every edge. With neighbours scattered over a table larger than the cache, each read is
a miss. A block of rows that mostly reads its own rows stays in the cache. METIS cuts the part into such blocks. Edges
of a row keep their order, so its sum has the same bits; dropout, predictions and files use global ids. Sums over rows
(the loss, gradients of weights) add in another order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor

from gnnpar.data.raw import MASKS
from gnnpar.folds.block import Block, chosen
from gnnpar.partition.partition import metis
from gnnpar.partition.shard import Shard

Order = Literal["none", "metis", "auto"]
BLOCK_ROWS = 1536  # rows of 128 fp32 numbers: 768 KiB, a share of a core's L2 cache
FEWEST_ROWS = 6 * BLOCK_ROWS  # a smaller table stays in the cache in any order
GAIN = 0.6  # auto: at most this share of the original fetches
_WINDOWS = 32


def in_order(shard: Shard, how: Order) -> tuple[Shard, str]:
    """Return the shard with its rows in blocks and a line on the effect, or the unchanged shard and ''. auto: only if a
    table of rows exceeds the cache, and blocks save two fifths of the `fetches`."""
    if how == "none" or (how == "auto" and shard.num_inner < FEWEST_ROWS):
        return shard, ""
    inner = shard.inner
    edges = torch.stack([inner.indices.long(), inner.edge_dst]).cpu()
    parts = max(2, -(-shard.num_inner // BLOCK_ROWS))
    if shard.num_inner < parts or not inner.num_edges:
        return shard, ""
    block_of = metis(edges, shard.num_inner, parts, seed=0)
    ordered = permuted(shard, torch.argsort(block_of, stable=True).to(shard.node_ids.device))
    before, after = fetches(inner), fetches(ordered.inner)
    if how == "auto" and after > GAIN * before:
        return shard, ""
    return ordered, f"rows in {parts} blocks: {before:.2f} -> {after:.2f} fetches an edge"


def fetches(block: Block, rows: int = BLOCK_ROWS) -> float:
    """Return distinct sources per edge, over windows of `rows` destinations: the misses of a cache of that many rows.
    Near 0 if all edges of a window read one row, 1 if all read different rows. Use at most 32 evenly spread windows."""
    ends = block.indptr.long().cpu()
    starts = range(0, block.num_listed, rows)
    read = distinct = 0
    for first in list(starts)[:: max(1, len(starts) // _WINDOWS)]:
        sources = block.indices[int(ends[first]) : int(ends[min(first + rows, block.num_listed)])]
        read, distinct = read + len(sources), distinct + len(sources.unique())
    return distinct / max(1, read)


def permuted(shard: Shard, order: Tensor) -> Shard:
    """Return the part with row order[i] at place i. Shapes: order [N], a permutation. The order of messages does not
    change: rows of a peer by ascending global id."""
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order), device=order.device)
    assert shard.copies is None and shard.pairs is None and shard.num_chunks == 1
    of_nodes = ("node_ids", "x", "y", *MASKS, "in_degree", "in_weight", "type_degree")
    return replace(
        shard,
        **{name: chosen(vars(shard)[name], order) for name in of_nodes},
        inner=_renumbered(shard.inner, place, columns=True),
        halo={peer: _renumbered(block, place, columns=False) for peer, block in shard.halo.items()},
        boundary={peer: place[index] for peer, index in shard.boundary.items()},
    )


def _renumbered(block: Block, place: Tensor, *, columns: bool) -> Block:
    """Move rows to their new places, and columns too if they are the same nodes. Shapes: place [num_dst]."""
    dst = place[block.edge_dst]
    order = torch.argsort(dst, stable=True)
    sources = block.indices[order]
    ids = block.src_ids
    if columns:
        sources = place[sources.long()]
        ids = None if ids is None else torch.empty_like(ids).index_copy_(0, place, ids)
    ordered = Block.from_edges(
        dst[order],
        sources,
        num_dst=block.num_dst,
        num_src=block.num_src,
        src_ids=ids,
        edges=block.edges.at(order),
        compress=block.rows is not None,
    )
    return replace(ordered, ascends=not columns)
