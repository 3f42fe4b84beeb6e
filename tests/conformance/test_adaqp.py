"""AdaQP in training: what is sent, what a switch does, and the noise of gradients. Its row: methods.py."""

import json
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from composing import configured, names
from conformance.methods import QUICK
from engines import Rank, on_ranks
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.adaptive.links import nominal
from gnnpar.codecs.codec import Identity
from gnnpar.codecs.uniform import Random, Uniform, code_of
from gnnpar.data.synthetic import SBM
from gnnpar.models.gcn import GCN
from gnnpar.models.sage import SAGE
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import Job, make_job, small_graph, train_in_threads
from gnnpar_kernels.wire import row_nbytes
from outcomes import assert_same_bits


def test_the_modes_are_the_products_of_codec_and_overlap():
    modes = {name: configured("strategy", name) for name in ("adaqp", "adaqp_q", "adaqp_p")}
    assert {name: (type(m.codec).__name__, m.overlap) for name, m in modes.items()} == {
        "adaqp": ("Adaptive", "edges"),
        "adaqp_q": ("Adaptive", "none"),
        "adaqp_p": ("Identity", "edges"),
    }
    for name in (n for n in names("strategy") if n.startswith("adaqp")):
        assert configured("strategy", name).exact_limit().codec == Identity()


def test_scores_no_wider_than_their_metadata_are_sent_as_they_are():
    """Of two heads, in fp64. Rows without scores: methods.py."""
    codec = Uniform(bits=2, score_bits=8)
    config = configured("model", "gat", "model.hidden=8", "model.num_layers=3", "model.heads=2")
    rows = sum(make_job(AdaQP(codec=codec), config, small_graph(), world=3).plan.statistics["halo_rows"])
    expected = rows * (sum(row_nbytes(width, code_of(2)) for width in (8, 8, 3)) + 8 * (2 + 2 + 1))
    for traffic in train_in_threads(AdaQP(codec=codec), config, small_graph(), world=3).traffic:
        assert (traffic["forward"], traffic["backward"]) == (expected, expected)


def test_cached_features_are_fetched_as_they_are():
    """Noise drawn once would stay for the whole run."""
    config = configured("model", "gcn", "model.hidden=8", "model.num_layers=1", "model.order=aggregate_first")
    got = train_in_threads(AdaQP(codec=Uniform(bits=2)), config, small_graph(), world=3, first_layer="cached")
    exact = train_in_threads(Single(), config, small_graph(), world=1, first_layer="cached")
    assert got.losses == pytest.approx(exact.losses, rel=1e-9)


class Spread(NamedTuple):
    """`variance`: of the gradient, all entries; `halo_bytes`: of one epoch, all ranks; `mean_bits` of a choice."""

    variance: float
    halo_bytes: int
    mean_bits: float | None


@cache
def job_of(config) -> Job:
    """Every codec meets the same weights; dropout would be noise of its own."""
    data = SBM(num_nodes=500, avg_degree=10, num_features=32, num_classes=5, degree_exponent=2.2).load(None, 0)
    model = config(num_layers=3, hidden=32, dropout=0.0)
    return replace(make_job(AdaQP(), model, data, world=2, seed=1, dtype=torch.float32), seed=5)


@cache
def spread(config, codec, draws: int = 20) -> Spread:
    """Of epochs 3 on, after a choice in epoch 2."""

    def look(rank: Rank) -> tuple[Tensor, int, dict]:
        engine, facts = rank.engine, {}
        for epoch in (1, 2):
            engine.reduced_gradient(epoch)
        for runtime in engine._codecs:
            facts |= getattr(runtime, "facts", dict)()
        engine._comm.ledger.drain()
        gradients = torch.stack([engine.reduced_gradient(epoch) for epoch in range(3, 3 + draws)])
        sent = engine._comm.ledger.drain().bytes
        return gradients, (sent["forward"] + sent["backward"]) // draws, facts

    ranks = on_ranks(replace(job_of(config), strategy=AdaQP(codec=codec)), look)
    gradients, _, facts = ranks[0]
    variance = float(gradients.double().var(0).sum())
    return Spread(variance, sum(sent for _, sent, _ in ranks), facts.get("assign/mean_bits"))


BOTH = [GCN, pytest.param(SAGE, marks=pytest.mark.slow)]  # hundreds of gradients each


@pytest.mark.slow
@pytest.mark.parametrize("config", BOTH)
def test_gradient_variance_falls_with_bits(config):
    two, four, eight = (
        spread(config, Uniform(bits=2)),
        spread(config, Uniform(bits=4), 40),
        spread(config, Uniform(bits=8)),
    )
    adaptive = spread(config, Adaptive(budget_bits=3))
    assert two.variance > adaptive.variance > four.variance > eight.variance
    assert 2.5 < (adaptive.mean_bits or 0) < 3.2


@pytest.mark.slow
@pytest.mark.parametrize("config", BOTH)
def test_adaptive_bits_are_worth_their_bytes(config):
    """At the bytes of 4 bits throughout, and at those of bits drawn at random from 2, 4, 8. Weighing rows by gradients
    over all exchanges is worth more than weighing them by degrees in each."""
    uniform, adaptive = spread(config, Uniform(bits=4), 40), spread(config, Adaptive(budget_bits=4), 40)
    assert adaptive.halo_bytes <= uniform.halo_bytes
    assert adaptive.variance < 0.95 * uniform.variance
    by_degree = Adaptive(budget_bits=4, importance="square_of_sum", scope="exchange")
    assert adaptive.variance < spread(config, by_degree).variance
    drawn, chosen = spread(config, Random()), spread(config, Adaptive(budget_bits=14 / 3))
    assert chosen.halo_bytes <= 1.02 * drawn.halo_bytes
    assert chosen.variance < 0.6 * drawn.variance


SWITCHES = [
    {"solver": "highs"},
    {"group_size": 10},
    {"trace": "range"},
    {"objective": "overlap"},
    {"importance": "square_of_sum", "scope": "exchange"},
    {"menu": (1, 4)},
]


@pytest.mark.parametrize("fields", SWITCHES, ids=str)
def test_every_switch_trains(fields):
    if "menu" in fields:
        fields = fields | {"first_bits": 4}
    got = train_in_threads(AdaQP(codec=replace(QUICK, **fields)), GCN(hidden=8), small_graph(), world=2, epochs=4)
    exact = train_in_threads(Single(), GCN(hidden=8), small_graph(), world=1, epochs=4)
    assert got.losses == pytest.approx(exact.losses, rel=0.3)
    assert got.traffic[1]["assign"] > 0 and got.traffic[3]["assign"] > 0
    assert "assign" not in got.traffic[2]


def test_link_costs_decide_and_come_from_a_file(tmp_path):
    """A slow link gets fewer bits; the same file gives the same training."""
    slow = nominal(2)
    slow = replace(slow, links={(0, 1): (8e-7, 0.0), (1, 0): (8e-9, 0.0)})
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(slow.as_json()))
    config = replace(QUICK, profile=path)
    runs = [train_in_threads(AdaQP(codec=config), GCN(hidden=8), small_graph(), world=2, epochs=3) for _ in range(2)]
    assert_same_bits(*runs)
    even = train_in_threads(AdaQP(codec=QUICK), GCN(hidden=8), small_graph(), world=2, epochs=3)
    assert runs[0].traffic[2] != even.traffic[2]


@pytest.mark.slow
def test_the_bias_of_the_gradient_is_an_l2_term():
    """Y = Q(H) W: the same noise is in the activation and in its weight's gradient, so that
    E[Q^T (Q W - Y)] = H^T (H W - Y) + diag(variance of the columns) W. No test may claim an unbiased gradient."""
    from gnnpar.codecs.adaptive.codec import row_variances
    from messages import Message

    torch.manual_seed(0)
    h, w, y = torch.randn(40, 48).relu(), torch.randn(48, 6), torch.randn(40, 6)
    message, draws = Message(Uniform(bits=2), 40), 1500
    sent = [message.send((h,), epoch=e)[0].double() for e in range(draws)]
    w, y, exact = w.double(), y.double(), h.double().T @ (h.double() @ w.double() - y.double())
    bias = torch.stack([q.T @ (q @ w - y) for q in sent]).mean(0) - exact
    variance = torch.stack(sent).var(0).sum(0)
    assert float(variance.sum()) == pytest.approx(float(row_variances(h, (2,), trace="exact").sum()), rel=0.02)
    predicted = variance[:, None] * w
    assert float((bias - predicted).norm() / predicted.norm()) < 0.15, "what is left is the error of the mean"
    along = float((bias * predicted).sum() / predicted.square().sum())
    assert along == pytest.approx(1.0, abs=0.05)
    assert float(bias.norm() / exact.norm()) > 0.01, "it is no small thing at 2 bits"
