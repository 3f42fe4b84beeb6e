"""Trained vectors of nodes (features=learned, both): a rank holds the rows of its own nodes. In a rank's weights, the
names of the vectors and of their node ids contain the part's number."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gnnpar.files import JsonDict
from gnnpar_kernels.hashing import entry_hash, fold_key

WEIGHT = "features.weight"
"""Name of the vectors of all nodes, [nodes, width]."""
PIECE, NODES = "features.piece", "features.nodes"
"""Name prefixes, before the part's number: its vectors [n, width], and the ids of its nodes, int64 [n]."""
_KEY = 0x0E3B  # separates these keys from others
_ROWS_AT_ONCE = 1 << 16


def initial_vectors(node_ids: Tensor, width: int, seed: int) -> Tensor:
    """Draw from N(0, 1), as nn.Embedding does, by seed, node and column: node_ids [n] -> [n, width] fp64 on the CPU."""
    return torch.cat([_normal(ids, width, seed) for ids in node_ids.cpu().split(_ROWS_AT_ONCE)])


def _normal(ids: Tensor, width: int, seed: int) -> Tensor:
    """Return the Box-Muller transform of two 32-bit hashes."""
    radius, angle = (entry_hash(ids, width, key=fold_key(seed, _KEY, i)).double() * 2**-32 for i in range(2))
    return (-2 * (radius + 2**-32).log()).sqrt() * (2 * math.pi * angle).cos()


def join(weights: dict[str, Tensor], state: JsonDict) -> None:
    """Replace the pieces of all parts by WEIGHT, in weights by name and in an optimizer's state by name."""
    if not (given := [name for name in weights if name.startswith(NODES)]):
        return
    order = torch.cat([weights.pop(name) for name in given]).argsort()
    pieces = [name.replace(NODES, PIECE) for name in given]
    weights[WEIGHT] = torch.cat([weights.pop(name) for name in pieces])[order]
    if slots := [state.pop(name) for name in pieces if name in state]:
        state[WEIGHT] = {
            slot: torch.cat([each[slot] for each in slots])[order] if _has_rows(value) else value
            for slot, value in slots[0].items()
        }


def deal(weights: dict[str, Tensor], state: JsonDict, own: Mapping[str, Tensor]) -> None:
    """Add a rank's piece of the vectors that `join` merged. own: weights of the rank, with the ids of its nodes."""
    for name, nodes in own.items():
        if name.startswith(NODES) and WEIGHT in weights:
            piece = name.replace(NODES, PIECE)
            weights |= {name: nodes, piece: weights[WEIGHT][nodes]}
            slots = state.get(WEIGHT, {}).items()
            state[piece] = {slot: value[nodes] if _has_rows(value) else value for slot, value in slots}


def _has_rows(slot: object) -> bool:
    return isinstance(slot, Tensor) and slot.ndim == 2
