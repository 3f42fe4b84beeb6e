"""Ranks that would start from other weights than rank 0 are refused, whatever their model draws from."""

from pathlib import Path

import pytest
from torch import nn

from conftest import Run
from gnnpar.comm import ThreadWorld
from gnnpar.comm.threads import ThreadCommunicator
from gnnpar.training import predict
from gnnpar.training.loop import refuse_unequal_weights


def test_every_rank_names_the_parameter_and_the_rank() -> None:
    def body(comm: ThreadCommunicator) -> None:
        model = nn.Linear(2, 3)
        for parameter in model.parameters():
            nn.init.ones_(parameter)
        refuse_unequal_weights(model, comm)
        if comm.rank == 2:
            model.bias.data[1] += 1e-6
        with pytest.raises(ValueError, match=r"^bias of the model has other initial values on rank 2 than on rank 0"):
            refuse_unequal_weights(model, comm)

    ThreadWorld(3).run(body)


NET = """
import numpy, torch
from torch_geometric.nn import GCNConv

class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.conv = GCNConv(in_channels, out_channels)
        self.scale = torch.nn.Parameter(torch.tensor(numpy.random.rand(out_channels), dtype=torch.float32))

    def forward(self, x, edge_index):
        return self.conv(x, edge_index) * self.scale
"""


def test_weights_from_numpy_are_one_line(run_here: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(NET)
    done = run_here("train", "model=pyg", "model.target=net.Net", "dataset=sbm", "comm=threads", "world_size=2")
    assert done.returncode != 0
    assert "scale of the model has other initial values on rank 1" in done.stderr
    assert "Traceback" not in done.stderr


def test_ranks_with_other_pairs_to_score_are_refused() -> None:
    def body(comm: ThreadCommunicator) -> None:
        with pytest.raises(ValueError, match=r"rank 1 has another content of pairs\.npy than rank 0"):
            predict._refuse_unlike(f"hash {comm.rank}", "content of pairs.npy", comm)

    ThreadWorld(2).run(body)
