"""Ranks that are threads share torch's generator: what one rank draws from it, another one does not change."""

import threading

import pytest
import torch
from torch import nn

from gnnpar.models.initial import construct
from gnnpar.models.pyg.model import PyG


def test_a_rank_that_looks_at_a_model_does_not_change_the_weights_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = construct(lambda: nn.Linear(3, 3), seed=0).weight
    looking, made, make = threading.Event(), threading.Event(), PyG._make

    def slow(self: PyG, *widths: object) -> nn.Module:
        net = make(self, *widths)  # type: ignore[arg-type]
        looking.set()
        made.wait(0.2)  # what holds the generator is waited for, so that this ends by itself
        return net

    monkeypatch.setattr(PyG, "_make", slow)
    other = threading.Thread(target=lambda: PyG(target="torch_geometric.nn.GCNConv").edge_data)

    def drawn_last() -> nn.Linear:
        made.set()
        other.join()  # had it begun before, it would now give back the generator's state of then
        return nn.Linear(3, 3)

    other.start()
    assert looking.wait(60)
    weight = construct(drawn_last, seed=0).weight
    assert torch.equal(weight, expected)
