"""The guide: it learns what the tree found, its weights are those of its architecture, and its priors are some."""

from __future__ import annotations

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from gnnpar.planner.guide import network
from gnnpar.planner.guide.features import CHOICE_WIDTH, RELATIONS, WIDTHS, choice_features, scene
from gnnpar.planner.guide.network import WEIGHTS, Guide, load, prior_of
from gnnpar.planner.planner import price_grids
from gnnpar.planner.search.named import run
from gnnpar.planner.search.points import Points

sys.path.insert(0, str(Path(__file__).parents[2] / "experiments"))

instances: Any = import_module("planner_search.instances")  # Any: modules of a study
training: Any = import_module("planner_search.train_guide")
HELD_OUT, draw, families = instances.HELD_OUT, instances.draw, instances.families


def test_the_shipped_weights() -> None:
    """Below 50 k parameters and 200 kB; read without pickles; every tensor is one of the architecture's."""
    assert WEIGHTS.stat().st_size < 200_000
    state = torch.load(WEIGHTS, weights_only=True)
    expected = Guide().state_dict()
    assert {k: v.shape for k, v in state.items()} == {k: v.shape for k, v in expected.items()}
    assert sum(v.numel() for v in state.values()) < 50_000
    assert all(bool(v.isfinite().all()) for v in load().state_dict().values())


def test_it_learns_and_its_weights_survive(tmp_path: Path) -> None:
    """On two tiny games the loss falls by a third at least; a saved guide gives the same priors to half precision."""
    torch.manual_seed(0)
    games = [game for game in (training.play(seed, None, plays=15, most=3) for seed in range(2)) if game is not None]
    assert games
    for game in games:
        for example in game.examples:
            assert float(example.target.sum()) == pytest.approx(1)
    guide = Guide()
    before = float(torch.stack([training.loss_of(guide, game) for game in games]).mean().detach())
    losses = training.fit(guide, games, epochs=40, seed=0, rate=6e-3)
    assert losses[-1] < 0.67 * before
    training.save(guide, tmp_path / "w.pt")
    points = Points(draw(0, split="held_out", most=6).request)
    start = (0,) * len(points.space.sizes)
    kept, again = (prior_of(g, points)((), start) for g in (guide.eval(), load(tmp_path / "w.pt")))
    assert again == pytest.approx(kept, abs=0.01)
    torch.save({"a": torch.zeros(1)}, tmp_path / "w2.pt")
    with pytest.raises(ValueError, match="holds no guide"):
        load(tmp_path / "w2.pt")


def test_scenes_and_priors() -> None:
    """Shapes, finite features, probabilities; a search with the guide stays in its budget and repeats itself."""
    request = draw(3, split="held_out", most=8).request
    points = Points(request)
    seen = scene(points)
    assert {name: x.shape[1] for name, x in seen.nodes.items()} == WIDTHS
    assert set(seen.edges) == set(RELATIONS)
    for name, x in seen.nodes.items():
        assert bool(x.isfinite().all()), name
    for (source, _, target), pairs in seen.edges.items():
        if pairs.numel():
            assert int(pairs[0].max()) < len(seen.nodes[source])
            assert int(pairs[1].max()) < len(seen.nodes[target])
    start = (0,) * len(points.space.sizes)
    rows, kinds = choice_features(points, (), start)
    assert rows.shape == (points.space.sizes[0], CHOICE_WIDTH)
    assert set(kinds) == {""}
    prior = prior_of(load(), points)
    for depth in range(len(start)):
        given = prior(start[:depth], start)
        assert len(given) == points.space.sizes[depth]
        assert sum(given) == pytest.approx(1, abs=1e-5)
    found = [run(request, "guided", budget=25, seed=4) for _ in range(2)]
    assert found[0].evaluations <= 25 + len(price_grids(request))
    assert found[0].evaluated[0].objective == found[1].evaluated[0].objective


def test_nothing_held_out_is_trained_on() -> None:
    for group, held in HELD_OUT.items():
        assert not set(held) & set(families("train", group))
        assert families("held_out", group) == held
    for seed in range(2):
        name = draw(seed, split="train", most=4).name
        assert not any(word in name for words in HELD_OUT.values() for word in words)
        assert draw(seed, split="train", most=4).name == name


def test_loading_the_prior_keeps_the_random_state(monkeypatch: pytest.MonkeyPatch) -> None:
    network.load.cache_clear()
    before = torch.random.get_rng_state()
    network.load()
    assert torch.equal(before, torch.random.get_rng_state())
