"""Random graphs, partitions, worlds and settings against the single device, in fp64: no example may differ.

HYPOTHESIS_PROFILE=nightly, which `make test-all` sets, draws 1000 examples.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from composing import configured, names
from gnnpar.data.dataset import Dataset
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import EPOCHS, train_in_threads

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"


@dataclass(frozen=True)
class Given:
    """A partition that was drawn, folded where fewer parts are asked for."""

    parts_of: tuple[int, ...]

    def part_of(self, dataset: Dataset, parts: int) -> torch.Tensor:
        return torch.tensor(self.parts_of) % parts


@st.composite
def graphs(draw: st.DrawFn) -> Dataset:
    """Directed, with loops, repeated edges and isolated nodes as they come; at least one node trains."""
    num_nodes = draw(st.integers(1, 14))
    node = st.integers(0, num_nodes - 1)
    pairs = draw(st.lists(st.tuples(node, node), max_size=40))
    edges = torch.tensor(pairs, dtype=torch.int64).reshape(-1, 2).T
    edges = edges[:, torch.argsort(edges[1] * num_nodes + edges[0], stable=True)]
    gen = torch.Generator().manual_seed(draw(st.integers(0, 9)))
    train = torch.rand(num_nodes, generator=gen) < 0.6
    train[draw(node)] = True
    return Dataset.of(
        "drawn",
        x=torch.randn(num_nodes, 3, generator=gen),
        y=torch.randint(0, 3, (num_nodes,), generator=gen),
        edge_index=edges,
        masks=(train, ~train, ~train),
        num_classes=3,
        task="single_label",
    )


def _takes(strategy: Any, ranks: int) -> bool:
    """Does it run two layers on so many ranks?"""
    try:
        strategy.check(ranks, 2, EPOCHS)
    except ValueError:
        return False
    return True


@st.composite
def runs(draw: st.DrawFn) -> tuple[Dataset, str, Any, int, Given, str]:
    """(graph, model, strategy, ranks, partition without empty parts, first_layer)."""
    dataset = draw(graphs())
    strategy = configured("strategy", draw(st.sampled_from(names("strategy")))).exact_limit()
    most = min(4, dataset.num_nodes, strategy.capabilities.max_ranks or 4)
    world = draw(st.sampled_from([ranks for ranks in range(1, most + 1) if _takes(strategy, ranks)]))
    parts = world
    if isinstance(strategy, SAR):
        rounds = draw(st.sampled_from(["part", "peer", "one"]))
        strategy = replace(strategy, rounds=rounds, backward=draw(st.sampled_from(["push", "pull"])))
        if world == 1 and dataset.num_nodes > 1 and draw(st.booleans()):
            parts = draw(st.integers(2, min(4, dataset.num_nodes)))
            strategy = replace(strategy, logical_parts=parts)
    elif isinstance(strategy, GraphParallel):
        strategy = replace(strategy, overlap=draw(st.sampled_from(["none", "edges", "central_marginal"])))
    rest = draw(st.lists(st.integers(0, parts - 1), min_size=dataset.num_nodes - parts, max_size=dataset.num_nodes))
    owners = draw(st.permutations([*range(parts), *rest[: dataset.num_nodes - parts]]))
    layers = ["live", "cached"] if strategy.capabilities.cached_first_layer else ["live"]
    first_layer = draw(st.sampled_from(layers))
    return dataset, draw(st.sampled_from(names("model"))), strategy, world, Given(tuple(owners)), first_layer


@pytest.mark.timeout(3000 if NIGHTLY else 300)
@settings(
    max_examples=1000 if NIGHTLY else 40,
    deadline=None,
    derandomize=not NIGHTLY,
    database=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(runs())
def test_every_way_to_run_is_the_single_device(run: tuple[Dataset, str, Any, int, Given, Any]) -> None:
    dataset, model, strategy, world, partition, first_layer = run
    config = configured("model", model, "model.hidden=4", "model.num_layers=2")
    if config.encoder != "none":
        first_layer = "live"  # refused otherwise: learned rows stand in front of layer 0
    expected = train_in_threads(Single(), config, dataset, world=1, first_layer=first_layer)
    got = train_in_threads(strategy, config, dataset, world=world, partition=partition, first_layer=first_layer)
    assert got.losses == pytest.approx(expected.losses, rel=1e-9, abs=1e-12)
    torch.testing.assert_close(got.logits, expected.logits, rtol=1e-9, atol=1e-11)
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        for name, gradient in theirs.items():
            scale = float(gradient.abs().max())
            torch.testing.assert_close(mine[name], gradient, rtol=1e-9, atol=1e-9 * scale + 1e-13)
