"""AdaQP in training: what 32 bits are, what is sent, what repeats, what a stop keeps; and the noise of gradients."""

import copy
import json
from dataclasses import replace
from functools import cache

import pytest
import torch

from composing import configured, covering, names
from engines import open_rank
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.adaptive.links import nominal
from gnnpar.codecs.codec import Identity
from gnnpar.codecs.uniform import Random, Uniform, code_of
from gnnpar.comm import ThreadWorld
from gnnpar.data.synthetic import SBM
from gnnpar.models.gcn import GCN
from gnnpar.models.sage import SAGE
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import make_job, relative_error, small_graph, train_in_threads
from gnnpar_kernels.wire import row_nbytes
from gradients import Spread, Study
from graphs import ODD
from outcomes import assert_same_bits

QUICK = Adaptive(warmup=1, period=2)
HIDDEN, CLASSES, HEADS, F = 8, 3, 2, 6


def model_of(name, *overrides):
    heads = [f"model.heads={HEADS}"] if name == "gat" else []
    return configured("model", name, f"model.hidden={HIDDEN}", "model.num_layers=3", *heads, *overrides)


@pytest.mark.parametrize(
    ("model", "codec", "dtype"),
    covering(["gcn", "gat"], [Identity(), Uniform(bits=32)], [torch.float32, torch.float64]),
)
def test_32_bits_are_graph_parallel_to_the_bit(model, codec, dtype):
    options = {"world": 3, "dtype": dtype}
    expected = train_in_threads(GraphParallel(), model_of(model), small_graph(), **options)
    assert_same_bits(train_in_threads(AdaQP(codec=codec), model_of(model), small_graph(), **options), expected)


def test_the_modes_are_the_products_of_codec_and_overlap():
    modes = {name: configured("strategy", name) for name in ("adaqp", "adaqp_q", "adaqp_p")}
    assert {name: (type(m.codec).__name__, m.overlap) for name, m in modes.items()} == {
        "adaqp": ("Adaptive", "edges"),
        "adaqp_q": ("Adaptive", "none"),
        "adaqp_p": ("Identity", "edges"),
    }
    for name in (n for n in names("strategy") if n.startswith("adaqp")):
        assert configured("strategy", name).exact_limit().codec == Identity()


@pytest.mark.parametrize("bits", [2, 8, "bf16"])
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_bytes_are_bits_and_metadata_summed(model, bits):
    codec = Uniform(bits=bits, score_bits=8)
    code = code_of(bits)
    job = make_job(AdaQP(codec=codec), model_of(model), small_graph(), world=3)
    rows = sum(job.plan.statistics["halo_rows"])
    widths = [(F, 0), (HIDDEN, HIDDEN), (CLASSES, CLASSES)]
    scores = 0
    if model == "gat":  # two heads' scores are no wider than their metadata: fp32 (here fp64) as they are
        widths, scores = [(HIDDEN, HIDDEN), (HIDDEN, HIDDEN), (CLASSES, CLASSES)], 8 * (HEADS + HEADS + 1)
    got = train_in_threads(AdaQP(codec=codec), model_of(model), small_graph(), world=3)
    forward = rows * (sum(row_nbytes(f, code) for f, _ in widths) + scores)
    backward = rows * (sum(row_nbytes(b, code) for _, b in widths if b) + scores)
    for traffic in got.traffic:
        assert (traffic["forward"], traffic["backward"]) == (forward, backward)


@pytest.mark.parametrize(
    "codec",
    [
        pytest.param(Uniform(bits=2), id="uniform", marks=pytest.mark.slow),
        pytest.param(Random(period=2), id="random"),
        pytest.param(QUICK, id="adaptive"),
    ],
)
def test_training_twice_gives_the_same_bits_and_evaluation_is_exact(codec):
    runs = [
        train_in_threads(AdaQP(codec=codec, overlap=overlap), model_of("gat"), small_graph(), world=3, epochs=5)
        for overlap in ("edges", "none")
    ]
    assert_same_bits(*runs)
    still = train_in_threads(AdaQP(codec=codec), model_of("gcn"), small_graph(), world=3, epochs=0)
    first = train_in_threads(Single(), model_of("gcn"), small_graph(), world=1, epochs=0)
    assert relative_error(still.logits, first.logits) < 1e-12
    exact = train_in_threads(GraphParallel(), model_of("gat"), small_graph(), world=3, epochs=5)
    assert exact.losses != runs[0].losses


@pytest.mark.parametrize(
    ("model", "codec"),
    [
        pytest.param("gcn", Uniform(bits=4), id="gcn-uniform"),
        pytest.param("gcn", Random(), id="gcn-random"),
        pytest.param("gatv2", QUICK, id="gatv2-adaptive"),
        pytest.param("gatv2", Uniform(bits=4), id="gatv2-uniform", marks=pytest.mark.slow),
        pytest.param("gatv2", Random(), id="gatv2-random", marks=pytest.mark.slow),
        pytest.param("gcn", QUICK, id="gcn-adaptive", marks=pytest.mark.slow),
    ],
)
def test_sar_reads_the_same_rows(model, codec):
    """Pulled peer by peer, rematerialised: the numbers of graph_parallel, for no key knows a phase."""
    told = replace(codec, powers=((-1.0, 0.0),)) if isinstance(codec, Adaptive) else codec
    config = model_of(model, "model.heads=2" if model == "gatv2" else "model.hidden=8")
    expected = train_in_threads(GraphParallel(codec=told), config, small_graph(), world=3, epochs=4)
    got = train_in_threads(SAR(codec=told, rounds="peer", backward="pull"), config, small_graph(), world=3, epochs=4)
    assert_same_bits(got, expected)


@pytest.mark.parametrize("codec", [Uniform(bits=8), QUICK], ids=["uniform", "adaptive"])
def test_sar_pushes_what_it_sent(codec):
    """Cut lists and pushed rows: near the exact gradient, as sources are read as their readers had them."""
    config = model_of("gat")
    exact = train_in_threads(Single(), config, small_graph(), world=1, epochs=1)
    got = train_in_threads(SAR(codec=codec, rounds=800 / 2**20), config, small_graph(), world=3, epochs=3)
    for name, gradient in exact.gradients[0].items():
        assert relative_error(got.gradients[0][name], gradient) < 0.2, name


@pytest.mark.parametrize("name", ["path", "star", "no_boundary", "directed", "multi_edges"])
def test_odd_graphs(name):
    data = ODD[name]()
    got = train_in_threads(AdaQP(codec=QUICK), GCN(hidden=8), data, world=3, epochs=4)
    exact = train_in_threads(Single(), GCN(hidden=8), data, world=1, epochs=4)
    assert got.losses == pytest.approx(exact.losses, rel=0.3)


def test_cached_features_are_fetched_as_they_are():
    """Noise drawn once would stay for the whole run."""
    config = configured("model", "gcn", "model.hidden=8", "model.num_layers=1", "model.order=aggregate_first")
    got = train_in_threads(AdaQP(codec=Uniform(bits=2)), config, small_graph(), world=3, first_layer="cached")
    exact = train_in_threads(Single(), config, small_graph(), world=1, first_layer="cached")
    assert got.losses == pytest.approx(exact.losses, rel=1e-9)


def test_what_a_stop_must_keep():
    """Bits, traces, the epoch of the last choice: a codec that gets them goes on with the same numbers."""
    job = make_job(AdaQP(codec=Adaptive(warmup=1, period=4)), model_of("gcn"), small_graph(), world=2)

    def body(comm):
        through, stopped = open_rank(job, comm).engine, None
        buckets, again = [], []
        for epoch in range(8):
            if epoch in (3, 5):  # in a period; after the traces of epoch 4, before the choice of epoch 5
                stopped = open_rank(job, comm).engine
                stopped.load_state_dict(copy.deepcopy(through.state_dict()))
            buckets.append(through.reduced_gradient(epoch))
            if stopped is not None:
                again.append(torch.equal(stopped.reduced_gradient(epoch), buckets[-1]))
        return again

    for again in ThreadWorld(2).run(body):
        assert again == [True] * 5


@cache
def study(config) -> Study:
    data = SBM(num_nodes=500, avg_degree=10, num_features=32, num_classes=5, degree_exponent=2.2)
    return Study(data.load(None, 0), config(num_layers=3, hidden=32, dropout=0.0))


@cache
def spread(config, codec, draws: int = 20) -> Spread:
    return study(config).spread(codec, draws=draws)


BOTH = [GCN, pytest.param(SAGE, marks=pytest.mark.slow)]  # hundreds of gradients each


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


def test_a_group_larger_than_a_message_is_one_line():
    with pytest.raises(
        ValueError, match=r"codec.group_size=500, but the forward message from rank \d to \d has \d+ rows; "
    ):
        train_in_threads(AdaQP(codec=Adaptive(group_size=500)), GCN(hidden=8), small_graph(), world=2, epochs=1)


def test_the_bias_of_the_gradient_is_an_l2_term():
    """Y = Q(H) W: the same noise is in the activation and in its weight's gradient, so that
    E[Q^T (Q W - Y)] = H^T (H W - Y) + diag(variance of the columns) W. No test may claim an unbiased gradient."""
    from gnnpar.codecs.adaptive.traces import row_variances
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
