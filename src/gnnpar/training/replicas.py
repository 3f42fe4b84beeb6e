"""Every rank has to start from the same weights: no strategy compares them afterwards."""

from __future__ import annotations

from torch import nn

from gnnpar.comm.communicator import Communicator
from gnnpar.training.checkpoint.state import tree_hash


def refuse_unequal_weights(model: nn.Module, comm: Communicator) -> None:
    """ValueError on every rank where one has another initial value of a parameter or buffer than rank 0. Collective.

    So it is where a model draws from what no seed of gnnpar reaches: numpy, random, the time, another generator.
    """
    mine = {name: tree_hash(tensor) for name, tensor in model.state_dict().items()}
    everyone = comm.gather(mine) or [mine]
    unlike = [(rank, name) for rank, theirs in enumerate(everyone) for name in mine if theirs.get(name) != mine[name]]
    unlike = comm.broadcast(unlike[:1])  # those of rank 0, who alone has gathered them
    for rank, name in unlike:
        raise ValueError(
            f"{name} of the model has other initial values on rank {rank} than on rank 0; draw them from torch's "
            "generator (torch.nn.init), which gnnpar seeds, not from numpy, random or a generator without a seed"
        )
