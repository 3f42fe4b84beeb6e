"""A vector of each node that trains with the model (features=learned, both), in pieces: a rank has its own nodes' rows.

A piece is among the weights of a rank by a name with its part in it, and so is which nodes it is of.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from gnnpar.durable import JsonDict
from gnnpar_kernels.hashing import entry_hash, fold_key

WEIGHT = "features.weight"
"""The name of all vectors together, [nodes, width]."""
_PIECE, _NODES = "features.piece", "features.nodes"
_KEY = 0x0E3B  # keeps these keys apart from others
_ROWS_AT_ONCE = 1 << 16


def piece_of(part: int) -> str:
    """The name of a part's vectors, a parameter [nodes of the part, width]."""
    return f"{_PIECE}{part}"


def nodes_of(part: int) -> str:
    """The name of the ids of a part's nodes, int64 [nodes of the part]."""
    return f"{_NODES}{part}"


def initial_vectors(node_ids: Tensor, width: int, seed: int) -> Tensor:
    """Draw from N(0, 1), as nn.Embedding does, by seed, node and column alone. Shapes: node_ids [n] -> [n, width] fp64
    on the CPU."""
    return torch.cat([_normal(ids, width, seed) for ids in node_ids.cpu().split(_ROWS_AT_ONCE)])


def _normal(ids: Tensor, width: int, seed: int) -> Tensor:
    """Box and Muller's transform of two hashes of 32 bits."""
    radius, angle = (entry_hash(ids, width, key=fold_key(seed, _KEY, i)).double() * 2**-32 for i in range(2))
    return (-2 * (radius + 2**-32).log()).sqrt() * (2 * math.pi * angle).cos()


def dealt(weights: Mapping[str, Tensor], state: JsonDict, own: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Weights with the piece that `own` names, made of the pieces in `weights`; the optimizer's `state` by name gets
    its slots. ValueError where a node of it has no vector there."""
    mine = next(((name, nodes) for name, nodes in own if name.startswith(_NODES)), None)
    given = [name for name in weights if name.startswith(_NODES)]
    if mine is None or not given:
        return dict(weights)
    nodes = torch.cat([weights[name] for name in given])
    ascending, order = nodes.sort()
    at = torch.searchsorted(ascending, mine[1]).clamp_max(len(nodes) - 1)
    if not torch.equal(ascending[at], mine[1]):
        raise ValueError("features=learned has a vector for each node of the graph it was trained on, and of no other")
    pieces = [name.replace(_NODES, _PIECE) for name in given]
    piece = mine[0].replace(_NODES, _PIECE)
    held = [state[name] for name in pieces if name in state]
    if len(held) == len(pieces):
        state[piece] = {
            slot: torch.cat([each[slot] for each in held])[order[at]] if _is_of_rows(value) else value
            for slot, value in held[0].items()
        }
    return {**weights, mine[0]: mine[1], piece: torch.cat([weights[name] for name in pieces])[order[at]]}


def _is_of_rows(slot: object) -> bool:
    return isinstance(slot, Tensor) and slot.ndim == 2


def collected(weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of all ranks by name, with all vectors in the order of nodes as WEIGHT in the place of pieces."""
    kept = {name: weight for name, weight in weights.items() if not name.startswith((_PIECE, _NODES))}
    if not (given := [name for name in weights if name.startswith(_NODES)]):
        return kept
    order = torch.cat([weights[name] for name in given]).argsort()
    return kept | {WEIGHT: torch.cat([weights[name.replace(_NODES, _PIECE)] for name in given])[order]}
