"""Feature parallelism: shares of columns and heads; docs/strategies/feature.md is the specification."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from composing import configured
from gnnpar.codecs.codec import BFloat16, Drop
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import RowLike
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax
from gnnpar.folds.sum import Sum
from gnnpar.parallel.feature.strategy import FeatureParallel
from gnnpar.parallel.feature.view import Slices, slices_of
from gnnpar.verify.conformance import make_job, small_graph, train_in_threads

WORLD = 3


def model_of(name: str, *overrides: str) -> Any:
    return configured("model", name, "model.hidden=8", "model.num_layers=3", *overrides)


def like(*shape: int) -> RowLike:
    return RowLike(shape, torch.float64, torch.device("cpu"))


@pytest.mark.parametrize(("width", "ranks"), [(8, 3), (3, 5), (4, 4), (1, 2)])
def test_shares_cover_the_width_without_overlap(width: int, ranks: int) -> None:
    slices = Slices("columns", width, ranks)
    spans = [slices.span(q) for q in range(ranks)]
    assert [i for a, b in spans for i in range(a, b)] == list(range(width))
    assert [slices.works(q) for q in range(ranks)] == [b > a for a, b in spans]
    for members in slices.classes:
        assert len({spans[q][1] - spans[q][0] for q in members}) == 1
    assert sorted(q for members in slices.classes for q in members) == [q for q in range(ranks) if slices.works(q)]


def test_what_is_divided_follows_from_the_fold() -> None:
    attention = (like(4, 6), like(4))
    assert slices_of(Sum(), (like(3, 5),), 0, 2, 0) == Slices("columns", 15, 2)
    assert slices_of(Max(), (like(7),), 0, 2, 0).how == "columns"
    assert slices_of(Softmax(), attention, 1, 4, 0) == Slices("heads", 4, 4)
    assert slices_of(Softmax(), attention, 1, 5, 0) == Slices("values", 6, 5, frozenset({1, 2}))
    with_dropout = Softmax(dropout=configured_dropout())
    assert slices_of(with_dropout, attention, 1, 2, 0).how == "values"
    heads = Generic(value=lambda s, d, e, w: s[0], by_heads=True)
    assert slices_of(heads, (like(2, 6),), 1, 4, 0) == Slices("heads", 2, 4)
    with pytest.raises(ValueError, match="but Generic of layer 2 separates by neither: use strategy=graph_parallel"):
        slices_of(Generic(value=lambda s, d, e, w: s[0]), (like(6),), 0, 2, 2)


def configured_dropout() -> Any:
    from gnnpar.folds.aggregator import EdgeDropout

    return EdgeDropout(0.5, 1)


def test_sums_of_a_cached_first_layer_travel_once() -> None:
    got = train_in_threads(FeatureParallel(), model_of("gcn"), small_graph(), world=WORLD, first_layer="cached")
    live = train_in_threads(FeatureParallel(), model_of("gcn"), small_graph(), world=WORLD)
    assert got.traffic[0] == live.traffic[0]
    assert live.traffic[1]["forward"] - got.traffic[1]["forward"] == 2 * 8 * sum(shares(6, WORLD, part_sizes()))


def part_sizes(model: str = "gcn") -> list[int]:
    plan = make_job(FeatureParallel(), model_of(model), small_graph(), world=WORLD).plan
    return torch.bincount(plan.part_of).tolist()


def shares(width: int, ranks: int, sizes: list[int]) -> list[int]:
    """Numbers that each rank receives of the rows of others."""
    mine = [width // ranks + (q < width % ranks) for q in range(ranks)]
    return [(sum(sizes) - n) * w for n, w in zip(sizes, mine, strict=True)]


def test_bytes_are_those_of_the_formula_whatever_the_cut() -> None:
    sizes = part_sizes()
    got = train_in_threads(
        FeatureParallel(), model_of("gcn", "model.order=transform_first"), small_graph(), world=WORLD
    )
    expected = 2 * 8 * sum(sum(shares(w, WORLD, sizes)) for w in (8, 8, 3))
    for epoch in got.traffic:
        assert epoch["forward"] == epoch["backward"] == expected
    # 4 heads on 3 ranks: features, scores of sources and of destinations, results; then one head of 3 values
    got = train_in_threads(FeatureParallel(), model_of("gat", "model.heads=4"), small_graph(), world=WORLD)
    heads = sum(shares(4, WORLD, sizes))
    last = 2 * sum(shares(3, WORLD, sizes)) + 2 * sum(sum(sizes) - n for n in sizes)
    expected = 8 * (2 * (2 + 1 + 1 + 2) * heads + last)
    for epoch in got.traffic:
        assert epoch["forward"] == epoch["backward"] == expected


@pytest.mark.quick(2)
@pytest.mark.parametrize("codec", [BFloat16(), Uniform(bits=8), Random(menu=(4, 8), period=1), Drop()], ids=str)
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_codecs_change_what_travels(model: str, codec: Any) -> None:
    config, data = configured("model", model, "model.hidden=96", "model.num_layers=2"), small_graph()
    exact = train_in_threads(FeatureParallel(), config, data, world=2)
    got = train_in_threads(FeatureParallel(codec=codec), config, data, world=2)
    assert torch.isfinite(got.logits).all()
    assert got.traffic[0].get("forward", 0) < exact.traffic[0]["forward"]
    mine, expected = (torch.cat([g.flatten() for g in run.gradients[0].values()]) for run in (got, exact))
    error = float((mine - expected).norm() / expected.norm())
    assert (0.5 if isinstance(codec, Drop) else 1e-4) < error < (10 if isinstance(codec, Drop) else 0.3)
