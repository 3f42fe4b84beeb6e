"""CoFree-GNN on one device: the parts of a vertex cut as one graph without an edge between them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import accumulate

import torch

from gnnpar.folds.block import Block
from gnnpar.folds.edge_data import EdgeData
from gnnpar.partition.shard import Copies


def union_of(parts: Sequence[Copies]) -> Copies:
    """Return nodes and edges of all parts, one part after the other."""
    shards = [part.shard for part in parts]
    firsts = [0, *accumulate(s.num_inner for s in shards)]
    num_nodes = firsts[-1]
    in_weight = [s.in_weight for s in shards if s.in_weight is not None]
    type_degree = [s.type_degree for s in shards if s.type_degree is not None]
    block = Block.from_edges(
        torch.cat([s.inner.edge_dst + first for s, first in zip(shards, firsts, strict=False)]),
        torch.cat([s.inner.indices.long() + first for s, first in zip(shards, firsts, strict=False)]),
        num_dst=num_nodes,
        num_src=num_nodes,
        src_ids=torch.arange(num_nodes),
        edges=EdgeData.cat([s.inner.edges for s in shards]),
    )
    shard = replace(
        shards[0],
        node_ids=torch.cat([s.node_ids for s in shards]),
        x=torch.cat([s.x for s in shards]),
        y=torch.cat([s.y for s in shards]),
        train_mask=torch.cat([s.train_mask for s in shards]),
        val_mask=torch.cat([s.val_mask for s in shards]),
        test_mask=torch.cat([s.test_mask for s in shards]),
        in_degree=torch.cat([s.in_degree for s in shards]),
        in_weight=torch.cat(in_weight) if in_weight else None,
        type_degree=torch.cat(type_degree) if type_degree else None,
        inner=block,
    )
    return Copies(shard, torch.cat([p.share for p in parts]), torch.cat([p.number for p in parts]))
