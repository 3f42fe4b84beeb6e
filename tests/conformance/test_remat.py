"""A chunk computed again instead of kept: the same bits for every model and layout, and less memory, as planned."""

from functools import cache
from typing import Any

import pytest
import torch

from composing import configured, covering, names
from engines import on_ranks
from gnnpar.models.gcn import GCN
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.pipeline.stage import Remat
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.training.memory import measure_epoch
from gnnpar.verify.conformance import Outcome, make_job, small_graph, train_in_threads
from outcomes import assert_same_bits

REMATS: tuple[Remat, ...] = ("chunk", "layer")
LAYOUTS: list[dict[str, Any]] = [
    {"stages": 1, "remat": "chunk"},
    {"stages": 2, "remat": "layer"},
    {"stages": 4, "remat": "chunk"},
    {"stages": 2, "virtual": 2, "remat": "chunk"},
    {"stages": 1, "virtual": 2, "remat": "layer"},
    {"parts": 2, "stages": 2, "remat": "chunk"},
    {"parts": 2, "stages": 2, "remat": "layer"},
]


def same_bits(mine: Outcome, theirs: Outcome) -> None:
    assert_same_bits(mine, theirs)
    for sent, other in zip(mine.traffic, theirs.traffic, strict=True):
        assert sent.get("forward") == other.get("forward"), "nothing is sent twice"
        assert sent.get("backward") == other.get("backward")


QUICK = ("gcn", "gat", "gcnii")  # a sum, attention, a second tensor that travels along
REST = [m for m in names("model") if m not in QUICK]


def trained(model: str, **rules: Any) -> Outcome:
    config = configured("model", model, "model.hidden=8", "model.num_layers=4", "model.dropout=0.4")
    parts = rules.get("parts", 1)
    strategy = Hybrid(**{"parts": 1, "chunks": 4 * parts, "refresh": 1} | rules)
    return train_in_threads(strategy, config, small_graph(), world=rules["stages"] * parts, epochs=2)


@cache
def kept(model: str, parts: int) -> Outcome:
    """Nothing computed again: stages do not change a bit either."""
    return trained(model, parts=parts, stages=2)


@pytest.mark.parametrize(("model", "layout"), covering(names("model"), LAYOUTS, together=1, rest=REST))
def test_every_layout_gives_the_same_bits(model: str, layout: dict[str, Any]) -> None:
    same_bits(trained(model, **layout), kept(model, layout.get("parts", 1)))


@pytest.mark.parametrize(
    "rules",
    [
        {"gradient": "mix", "mixing": 0.3, "refresh": 2},
        {"gradient": "fresh", "order": "fixed", "history_init": "exact", "refresh_exact": True, "refresh": 2},
    ],
)
def test_every_technique_gives_the_same_bits(rules: dict[str, Any]) -> None:
    config = configured("model", "resgcn", "model.hidden=8", "model.num_layers=4", "model.dropout=0.4")
    given: dict[str, Any] = {"chunks": 8, "stages": 2, "parts": 2} | rules
    runs = [
        train_in_threads(Hybrid(**given, remat=remat), config, small_graph(), world=4, epochs=3, dtype=torch.float32)
        for remat in ("none", *REMATS)
    ]
    for other in runs[1:]:
        same_bits(other, runs[0])


def measured(remat: Remat, *, layers: int, chunks: int, hidden: int, nodes: int) -> tuple[int, int]:
    """Bytes in the second epoch of one rank in fp32: the allocator's peak, and those kept for the backward."""
    data = small_graph(num_nodes=nodes, num_edges=2 * nodes)
    config = GCN(num_layers=layers, hidden=hidden, encoder="linear", decoder="linear", dropout=0.0)
    job = make_job(GNNPipe(chunks=chunks, chunking="range", remat=remat), config, data, world=1, dtype=torch.float32)
    (rank,) = on_ranks(job, lambda rank: rank)
    rank.train(1)
    rank.optimizer.zero_grad()
    with measure_epoch(torch.device("cpu")) as report:
        rank.engine.train_epoch(1, rank.optimizer)
    assert report.peak is not None
    return report.peak, report.activations + rank.engine.live_bytes()["activations"]


def test_bytes_fall_as_planned() -> None:
    """GCN keeps 2 N H numbers a layer (the matrix's input, the activation's output), and the encoder's output; `chunk`
    those of one of 8."""
    layers, nodes, hidden, chunks = 8, 1600, 32, 8
    rows = 4 * nodes * hidden
    found = {r: measured(r, layers=layers, chunks=chunks, hidden=hidden, nodes=nodes) for r in ("none", *REMATS)}
    kept = {r: nbytes for r, (_, nbytes) in found.items()}
    assert kept["none"] == pytest.approx((2 * layers + 1) * rows, rel=0.1)
    assert kept["chunk"] == pytest.approx((2 * layers + 1) * rows / chunks, rel=0.1)
    assert kept["layer"] == pytest.approx((layers - 1) * rows + 3 * rows / chunks, rel=0.1)
    for remat in REMATS:
        saved = found["none"][0] - found[remat][0]
        assert saved == pytest.approx(kept["none"] - kept[remat], rel=0.1), "the allocator saw it, too"
