"""Check that all ranks start from the same weights."""

from __future__ import annotations

from torch import nn

from gnnpar.comm.communicator import Communicator
from gnnpar.training.checkpoint.state import tree_hash


def refuse_unequal_weights(model: nn.Module, comm: Communicator) -> None:
    """Raise ValueError on every rank if initial parameters or buffers differ from rank 0's. Collective. The cause is a
    model that draws from numpy, random, the time or another generator that gnnpar does not seed."""
    held = (*model.named_parameters(), *model.named_buffers())
    everyone = comm.gather({name: tree_hash(tensor) for name, tensor in held}) or []
    unlike = [
        (rank, name)
        for rank, theirs in enumerate(everyone)
        for name, value in theirs.items()
        if everyone[0][name] != value
    ]
    for rank, name in comm.broadcast(unlike[:1]):
        raise ValueError(
            f"{name} of the model has other initial values on rank {rank} than on rank 0; draw them from torch's "
            "generator (torch.nn.init), which gnnpar seeds, not from numpy, random or a generator without a seed"
        )
