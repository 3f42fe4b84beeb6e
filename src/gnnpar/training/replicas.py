"""Check that all ranks have the same weights, at the start and after a checkpoint is read."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from gnnpar.comm.communicator import Communicator
from gnnpar.parallel.engine import Engine
from gnnpar.training.checkpoint.state import tree_hash


def refuse_unequal_weights(model: nn.Module, comm: Communicator) -> None:
    """ValueError on every rank where one has another initial value of a parameter or buffer than rank 0. Collective.

    So it is where a model draws from what no seed of gnnpar reaches: numpy, random, the time, another generator.
    """
    held = (*model.named_parameters(), *model.named_buffers())
    for rank, name in _unlike({name: tree_hash(tensor) for name, tensor in held}, comm):
        raise ValueError(
            f"{name} of the model has other initial values on rank {rank} than on rank 0; draw them from torch's "
            "generator (torch.nn.init), which gnnpar seeds, not from numpy, random or a generator without a seed"
        )


def refuse_unequal_replicas(engine: Engine, comm: Communicator, where: str) -> None:
    """ValueError on every rank where a checkpoint has given one another value of a parameter than a rank before it.
    Collective."""
    for rank, name in _unlike({name: tree_hash(weight) for name, weight in engine.named_parameters()}, comm):
        raise ValueError(
            f"{where} has other values of {name} for rank {rank} than for a rank before it: it is damaged, or forged"
        )


def _unlike(mine: Mapping[str, str], comm: Communicator) -> list[tuple[int, str]]:
    """The first rank that has another hash under a name than a rank before it, with the name. Collective."""
    first: dict[str, str] = {}
    everyone = comm.gather(dict(mine)) or [mine]
    unlike = [
        (rank, name)
        for rank, theirs in enumerate(everyone)
        for name, value in theirs.items()
        if first.setdefault(name, value) != value
    ]
    return comm.broadcast(unlike[:1])  # those of rank 0, who alone has gathered them
