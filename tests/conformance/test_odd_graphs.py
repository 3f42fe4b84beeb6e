"""Graphs that break assumptions: every model trains on them, alone and cut, with the same result."""

import pytest
import torch

from composing import ALIKE, configured, names, rest_slow
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.partition import Partitioner, Random, Range
from gnnpar.verify.conformance import relative_error, train_in_threads
from graphs import ODD


class Parity:
    """Even and odd ids."""

    def part_of(self, dataset, parts):
        return torch.arange(dataset.num_nodes) % parts


def worlds_of(num_nodes: int) -> list[int]:
    return [w for w in (1, 2, 3) if w <= num_nodes]


@pytest.mark.parametrize("graph", ODD)
@pytest.mark.parametrize("model", rest_slow(names("model"), *ALIKE))
def test_cut_equals_whole(graph, model):
    data = ODD[graph]()
    config = configured("model", model, "model.hidden=4", "model.num_layers=2")
    reference = train_in_threads(Single(), config, data, world=1)
    assert torch.isfinite(reference.logits).all()
    partitioners: dict[int, list[Partitioner]] = {1: [Random()], 2: [Parity()], 3: [Random(), Range(), Parity()]}
    for world in worlds_of(data.num_nodes):
        for by in partitioners[world]:
            got = train_in_threads(GraphParallel(), config, data, world=world, partition=by)
            assert got.losses == pytest.approx(reference.losses, rel=1e-9, abs=1e-12)
            assert relative_error(got.logits, reference.logits) < 1e-9
            for mine, theirs in zip(got.gradients, reference.gradients, strict=True):
                for key, expected in theirs.items():
                    torch.testing.assert_close(mine[key], expected, rtol=1e-9, atol=1e-12)
