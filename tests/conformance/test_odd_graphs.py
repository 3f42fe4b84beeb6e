"""Graphs that break assumptions: every model trains on them, alone and cut, with the same result."""

from itertools import product

import pytest
import torch

from composing import ALIKE, configured, names, rest_slow
from conformance.methods import QUICK
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sampling.strategy import Minibatch
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.partition import Partitioner, Random, Range
from gnnpar.verify.conformance import Outcome, relative_error, train_in_threads
from graphs import ODD


class Parity:
    """Even and odd ids."""

    def part_of(self, dataset, parts):
        return torch.arange(dataset.num_nodes) % parts


def worlds_of(num_nodes: int) -> list[int]:
    return [w for w in (1, 2, 3) if w <= num_nodes]


def assert_equals(got: Outcome, expected: Outcome) -> None:
    """Gradients may be zeros."""
    assert got.losses == pytest.approx(expected.losses, rel=1e-9, abs=1e-12)
    assert relative_error(got.logits, expected.logits) < 1e-9
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        for key, gradient in theirs.items():
            torch.testing.assert_close(mine[key], gradient, rtol=1e-9, atol=1e-12)


@pytest.mark.quick(9)
@pytest.mark.parametrize("graph", ODD)
@pytest.mark.parametrize("model", rest_slow(names("model"), *ALIKE))
def test_cut_equals_whole(graph, model):
    data = ODD[graph]()
    config = configured("model", model, "model.hidden=4", "model.num_layers=2")
    reference = train_in_threads(Single(), config, data, world=1)
    assert torch.isfinite(reference.logits).all()
    partitioners: dict[int, list[Partitioner]] = {1: [], 2: [Parity()], 3: [Random()]}
    if model in ("gat", "sage_max"):  # parts do not know which model runs
        partitioners = {1: [Random()], 2: [Parity()], 3: [Random(), Range(), Parity()]}
    for world in worlds_of(data.num_nodes):
        for by in partitioners[world]:
            got = train_in_threads(GraphParallel(), config, data, world=world, partition=by)
            assert_equals(got, reference)


SAMPLED = Minibatch(fanout=(2,), batch_size=3, sampler="own")
WAYS = {"push": SAR(), "pull": SAR(backward="pull"), "adaqp": AdaQP(codec=QUICK), "minibatch": SAMPLED}
CASES = [
    *product(ODD, ["push", "pull"]),
    *((graph, "adaqp") for graph in ("path", "star", "no_boundary", "directed", "multi_edges")),
    *((graph, "minibatch") for graph in ODD),
]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("graph", "way"), CASES)
def test_strategies_survive(graph, way):
    """Exact ones equal the single device; others come near, or train on: no edges, hubs, ranks without a seed."""
    data, strategy = ODD[graph](), WAYS[way]
    config = configured("model", "gcn" if way in ("adaqp", "minibatch") else "gat", "model.hidden=4")
    epochs = 4 if way == "adaqp" else 2
    alone = train_in_threads(Single(), config, data, world=1, epochs=epochs)
    worlds = worlds_of(data.num_nodes)
    for world in (worlds[1:] or worlds) if way in ("push", "pull") else worlds[-1:]:
        got = train_in_threads(strategy, config, data, world=world, epochs=epochs)
        if way == "minibatch":
            assert all(torch.isfinite(each) for each in (torch.tensor(got.losses).sum(), got.logits.sum()))
            still, first = (
                train_in_threads(s, config, data, world=w, epochs=0) for s, w in ((strategy, world), (Single(), 1))
            )
            assert relative_error(still.logits, first.logits) < 1e-9
        elif way == "adaqp":
            assert got.losses == pytest.approx(alone.losses, rel=0.3)
        else:
            assert_equals(got, alone)
