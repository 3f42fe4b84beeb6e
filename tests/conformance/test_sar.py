"""SAR: exact whatever its rounds, with parts in time, and with its bytes and held rows as formulas of the partition.

Bytes: 2C for linear folds, 3C pulled, C + T (F + 3H) pushed.
"""

from __future__ import annotations

import threading
import time
import weakref
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import pytest
import torch

from composing import configured
from conformance.methods import QUICK, TINY
from engines import on_ranks
from gnnpar.codecs.codec import BFloat16, Drop, Identity
from gnnpar.codecs.quantized import QuantizedRows
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import CodedExchange, MessageTag
from gnnpar.folds.softmax import Softmax
from gnnpar.parallel.engine import FlatEngine
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.local import Pass
from gnnpar.parallel.sequential import paging
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.sequential.view import SequentialGraph
from gnnpar.parallel.single.strategy import Single
from gnnpar.verify.conformance import make_job, relative_error, small_graph, train_in_threads
from gnnpar_kernels import fold_key
from outcomes import assert_equal, assert_same_bits

WORLD = 4
SMALL = ("model.hidden=8", "model.num_layers=2")
MODELS = {
    "gcn": ("gcn",),
    "gat": ("gat", "model.heads=2", "model.attention_dropout=0.4"),
    "gatv2": ("gatv2", "model.heads=2", "model.attention_dropout=0.4"),
    "sage_max": ("sage_max",),
}
WAYS = [("push", "gat"), *(("pull", model) for model in MODELS)]  # only attention has something to push


def model_of(name, *overrides):
    return configured("model", MODELS[name][0], *SMALL, *MODELS[name][1:], *overrides)


@pytest.fixture(scope="module")
def references():
    """The single device, once per model."""
    return {name: train_in_threads(Single(), model_of(name), small_graph(), world=1, epochs=1) for name in MODELS}


@pytest.mark.quick(4)
@pytest.mark.parametrize(("way", "rounds", "prefetch"), product(WAYS, ["peer", "one", "part", TINY], range(4)))
def test_every_schedule_equals_the_single_device(way, rounds, prefetch, references):
    backward, model = way
    strategy = SAR(rounds=rounds, prefetch=prefetch, backward=backward)
    assert_equal(train_in_threads(strategy, model_of(model), small_graph(), world=WORLD, epochs=1), references[model])


def test_the_tiny_budget_cuts_peers(monkeypatch):
    """What the test above means by it: blocks are cut, forward and pushed."""
    seen, true = set(), CodedExchange.take

    def watching(self, posted, peer):
        seen.add((posted.tag.phase, posted.incoming[peer].first > 0))
        return true(self, posted, peer)

    monkeypatch.setattr(CodedExchange, "take", watching)
    train_in_threads(SAR(rounds=TINY), model_of("gat"), small_graph(), world=WORLD, epochs=1)
    assert {("forward", True), ("push", True)} <= seen


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", [BFloat16(), Drop()], ids=["bf16", "drop"])
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_pushed_gradients_are_rounded_by_as_much_and_drop_sends_nothing(model, codec):
    config, data = model_of(model), small_graph()
    expected = train_in_threads(GraphParallel(codec=codec), config, data, world=WORLD)
    pushed = train_in_threads(SAR(codec=codec), config, data, world=WORLD)
    assert pushed.losses[0] == expected.losses[0]
    if isinstance(codec, Drop):
        assert pushed.traffic[1].keys() == {"reduce"}
        assert_equal(pushed, expected)
    exact = train_in_threads(Single(), config, data, world=1)
    name = "layers.0.conv.weight"
    error, theirs = (relative_error(each.gradients[0][name], exact.gradients[0][name]) for each in (pushed, expected))
    assert theirs / 3 < error < 3 * theirs


@pytest.mark.quick(1)
@pytest.mark.parametrize("codec", [Uniform(bits=8), QUICK], ids=["uniform", "adaptive"])
def test_quantized_pushes_are_near_the_gradient(codec):
    """Cut lists and pushed rows: sources are read as their readers had them."""
    exact = train_in_threads(Single(), model_of("gat"), small_graph(), world=1, epochs=1)
    got = train_in_threads(SAR(codec=codec, rounds=2 * TINY), model_of("gat"), small_graph(), world=3, epochs=3)
    for name, gradient in exact.gradients[0].items():
        assert relative_error(got.gradients[0][name], gradient) < 0.2, name


@pytest.fixture
def every_tensor_is_a_page(monkeypatch):
    monkeypatch.setattr(paging, "SMALLEST", 1)


@pytest.mark.quick(1)
@pytest.mark.usefixtures("every_tensor_is_a_page")
@pytest.mark.parametrize(("backward", "model"), [*WAYS, ("pull", "gcnii")])
def test_parts_out_of_core_equal_the_single_device(model, backward):
    config = configured("model", model, *SMALL, "model.num_layers=3")
    reference = train_in_threads(Single(), config, small_graph(), world=1, epochs=2)
    strategy = SAR(logical_parts=4, backward=backward)
    assert_equal(train_in_threads(strategy, config, small_graph(), world=1, epochs=2), reference)


@pytest.mark.slow
@pytest.mark.usefixtures("every_tensor_is_a_page")
def test_parts_in_time_are_parts_in_space():
    """The same bits as four ranks, also with a lossy codec: random numbers are keyed by rows, not by devices."""
    for codec in (Identity(), BFloat16()):
        in_space = train_in_threads(SAR(codec=codec), model_of("gat"), small_graph(), world=WORLD)
        in_time = train_in_threads(SAR(codec=codec, logical_parts=4), model_of("gat"), small_graph(), world=1)
        assert_same_bits(in_time, in_space)


@pytest.mark.usefixtures("every_tensor_is_a_page")
def test_the_probe_of_fidelity_and_the_state():
    job = make_job(SAR(logical_parts=3, codec=BFloat16()), model_of("gcn"), small_graph(), world=1)
    ((engine, *_),) = on_ranks(job, lambda rank: rank)
    exact, state = engine.exact_gradient(0), engine.state_dict()
    single = make_job(Single(), model_of("gcn"), small_graph(), world=1)
    (expected,) = on_ranks(single, lambda rank: rank.engine.exact_gradient(0))
    assert all(relative_error(exact[name], g) < 1e-9 for name, g in expected.items())
    assert [len(part["codecs"]) for part in state["parts"]] == [1, 1, 1]
    engine.load_state_dict(state)
    assert engine.live_bytes()["host"] > 0


F, HIDDEN, CLASSES, HEADS = 6, 8, 3, 2
ATTENTION = [(HIDDEN, HEADS)] * 2 + [(CLASSES, 1)]  # (F, H) of every layer
ROW, PUSHED = sum(f + h for f, h in ATTENTION), sum(f + 3 * h for f, h in ATTENTION)
PHASES = ("forward", "backward", "remat", "push")
NUMBERS: list[tuple[dict[str, Any], str, tuple[int, ...]]] = [  # of a row, in each phase
    ({}, "gcn", (F + HIDDEN + CLASSES, HIDDEN + CLASSES, 0, 0)),  # the gradient of features is not sent
    ({}, "sage_max", (F + HIDDEN + HIDDEN, HIDDEN + HIDDEN, 0, 0)),
    ({}, "gcnii", (3 * HIDDEN, 3 * HIDDEN, 0, 0)),
    ({"backward": "pull"}, "gat", (ROW, ROW, ROW, 0)),
    ({"backward": "pull", "remat": False}, "gat", (ROW, ROW, 0, 0)),
    ({}, "gat", (ROW, 0, 0, PUSHED)),
]
OF_OWN = ({}, "gatv2", (2 * HIDDEN + CLASSES,) * 3 + (0,))  # a fold without rows to push pulls in push mode, too


def config_of(model):
    heads = [f"model.heads={HEADS}"] if model in ("gat", "gatv2") else []
    return configured("model", model, f"model.hidden={HIDDEN}", "model.num_layers=3", *heads)


def counts(strategy, model):
    """(C, T) in rows: halo rows of all ranks; pairs of a destination and another part with an edge to it."""
    data, job = small_graph(), make_job(strategy, config_of(model), small_graph(), world=WORLD)
    (src, dst), part_of = data.edge_index, job.plan.part_of
    cut = part_of[src] != part_of[dst]
    halo = len(torch.unique(torch.stack([src[cut], part_of[dst][cut]]), dim=1).T)
    assert halo == sum(job.plan.statistics["halo_rows"])
    return halo, len(torch.unique(torch.stack([part_of[src][cut], dst[cut]]), dim=1).T)


def sent(strategy, model, dtype=torch.float64):
    got = train_in_threads(strategy, config_of(model), small_graph(), world=WORLD, dtype=dtype)
    per_epoch = [{phase: epoch.get(phase, 0) for phase in PHASES} for epoch in got.traffic]
    assert per_epoch[0] == per_epoch[1]
    return per_epoch[0]


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("case", "rounds"), [*product(NUMBERS, ["part", "one", TINY]), (OF_OWN, "part")], ids=lambda value: str(value)
)
def test_bytes_are_those_of_the_formula(case, rounds):
    options, model, numbers = case
    strategy = SAR(rounds=rounds, **options)
    halo, pushed = counts(strategy, model)
    rows = dict.fromkeys(PHASES, halo) | {"push": pushed}
    assert sent(strategy, model) == {phase: 8 * rows[phase] * n for phase, n in zip(PHASES, numbers, strict=True)}


def test_a_rounding_codec_leaves_pushed_statistics_whole():
    strategy = SAR(codec=BFloat16())
    halo, pushed = counts(strategy, "gat")
    push = pushed * sum(2 * f + 4 * 3 * h for f, h in ATTENTION)
    found = sent(strategy, "gat", torch.float32)
    assert found == {"forward": 2 * halo * ROW, "backward": 0, "remat": 0, "push": push}


def held(strategy, model):
    """Of every rank after one epoch: its record of remote bytes, the schedule, their sum, the rank."""
    job = make_job(strategy, config_of(model), small_graph(), world=WORLD)

    def look(rank):
        rank.train(1)
        assert isinstance(rank.engine, FlatEngine)
        view = rank.engine._view
        assert isinstance(view, SequentialGraph)
        return view.residency.most, view.schedule, rank.engine.live_bytes()["halo"], view.exchange.comm.rank

    return on_ranks(job, look)


@pytest.mark.quick(1)
@pytest.mark.parametrize("prefetch", [0, 1, 2, 3])
@pytest.mark.parametrize("rounds", ["peer", TINY])
def test_at_most_prefetch_and_one_rounds_are_alive(rounds, prefetch):
    """Also in backward: received gradients of a linear fold. Rounds that were used count no more."""
    for model, widths in (("gcn", (F, HIDDEN, CLASSES)), ("gat", tuple(f + h for f, h in ATTENTION))):
        for resident, schedule, total, rank in held(SAR(rounds=rounds, prefetch=prefetch), model):
            most = max(_window(schedule.pulls(8 * w), "incoming", rank, prefetch) * 8 * w for w in widths)
            if model == "gat":
                pushed = [f + 3 * h for f, h in ATTENTION]
                most = max(most, *(_window(schedule.pushes(8 * w), "incoming", rank, prefetch) * 8 * w for w in pushed))
            else:
                back = [w for w in widths if w != F]
                most = max(most, *(_window(schedule.pulls(8 * w), "outgoing", rank, prefetch) * 8 * w for w in back))
            assert resident == most
            assert total == most


def _window(rounds, direction, rank, prefetch):
    """Rows of the fullest prefetch + 1 consecutive rounds."""
    rows = [sum(s.num_rows for s in getattr(rounds, direction)(rank, r)) for r in range(len(rounds))]
    return max(sum(rows[r : r + prefetch + 1]) for r in range(len(rows)))


def test_without_rematerialisation_all_rows_stay():
    for resident, schedule, total, rank in held(SAR(backward="pull", remat=False), "gat"):
        assert total - resident == 8 * sum(schedule.pulled[rank]) * ROW


@pytest.mark.quick(1)
@pytest.mark.parametrize(("model", "backward", "rounds"), product(["gcn", "gat"], ["push", "pull"], ["peer", "one"]))
def test_decoded_rows_die_before_the_next_are_made(model, backward, rounds, monkeypatch):
    """The accounting above, checked against the tensors themselves: one slice of rows at a time."""
    alive: dict[int, list[weakref.ref]] = {}
    worst = []
    true = CodedExchange.take

    def watching(self, posted, peer):
        mine = alive.setdefault(self.comm.rank, [])
        until = time.monotonic() + 2.0  # the sender's thread may still be on its way out of its call
        while any(ref() is not None for ref in mine) and time.monotonic() < until:
            time.sleep(1e-3)
        worst.append(sum(ref() is not None for ref in mine))
        rows = true(self, posted, peer)
        buffers = [t._base for t in rows]  # decoded rows are views of what came in
        assert all(buffer is not None for buffer in buffers)
        mine.extend(map(weakref.ref, (*rows, *buffers)))
        return rows

    monkeypatch.setattr(CodedExchange, "take", watching)
    train_in_threads(SAR(backward=backward, prefetch=0, rounds=rounds), config_of(model), small_graph(), world=WORLD)
    assert len(worst) > 50
    assert max(worst) == 0


def test_a_probe_is_no_traffic():
    job = make_job(SAR(), config_of("gat"), small_graph(), world=2)

    def phases(rank):
        ledger = rank.engine._comm.ledger
        ledger.drain()
        rank.engine.exact_gradient(0)
        return ledger.drain().bytes.keys()

    assert all(found == {"evaluate"} for found in on_ranks(job, phases))


SUMS: dict[str, torch.Tensor] = {}
LOCK = threading.Lock()


@dataclass(frozen=True)
class Observed(Softmax):
    """Adds up what every block gives to its sources, before anything is sent."""

    def grad_src(self, back, src, pushed):
        grads = super().grad_src(back, src, pushed)
        with LOCK:
            SUMS["x"] = SUMS.get("x", 0) + grads[0].sum(0)
        return grads


def weight_sums(strategy, alter=lambda view: view):
    """sum_j alpha_ij as backward has it [N], per head, and which destinations have in-edges.

    With x_j = 1 and dO_i the i-th unit vector, the gradient of all sources together has sum_j alpha_ij in channel i.
    """
    data, heads, seed = small_graph(), 4, 5
    config = configured("model", "gat", "model.hidden=8", f"model.heads={heads}")
    job = make_job(strategy, config, data, world=WORLD, seed=seed)
    gen = torch.Generator().manual_seed(1)
    score_src, score_dst = (torch.randn(data.num_nodes, heads, dtype=torch.float64, generator=gen) for _ in range(2))
    SUMS.clear()

    def look(rank):
        view = alter(rank.engine._view).during(Pass(seed, epoch=1, training=True))
        ids, n = rank.shard.node_ids, data.num_nodes
        x = torch.ones(len(ids), heads, n, dtype=torch.float64, requires_grad=True)
        a_src, a_dst = score_src[ids].requires_grad_(), score_dst[ids].requires_grad_()
        out = view.aggregate(Observed(), (x, a_src), (a_dst,))
        out.backward(torch.eye(n, dtype=torch.float64)[ids][:, None, :].expand(-1, heads, -1))

    on_ranks(job, look)
    return SUMS["x"].T, data.in_degree > 0


COARSE = Uniform(bits=8, gradient_bits=32, score_bits=2)  # constant rows arrive as they are


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("backward", "rounds", "codec"), product(["push", "pull"], ["part", "peer", 0.01], [Identity(), BFloat16(), COARSE])
)
def test_attention_weights_made_again_sum_to_one(backward, rounds, codec):
    sums, reached = weight_sums(SAR(backward=backward, rounds=rounds, codec=codec))
    torch.testing.assert_close(sums[reached], torch.ones_like(sums[reached]), rtol=0, atol=1e-6)
    assert not sums[~reached].any()
    assert reached.any() and not reached.all()


def test_fresh_random_numbers_would_show(monkeypatch):
    """Rows that are sent again must be the same numbers; the owner always reads what was sent forward."""

    def fresh(self, tag: MessageTag, operand: int, sender: int) -> int:
        return fold_key(self.seed, *tag[:3], *tag.phase.encode(), operand, sender)

    monkeypatch.setattr(QuantizedRows, "noise_key", fresh)
    for backward in ("push", "pull"):
        sums, reached = weight_sums(SAR(backward=backward, codec=COARSE))
        wrong = float((sums[reached] - 1).abs().max())
        assert wrong > 1e-2 if backward == "pull" else wrong < 1e-6


def test_rounded_statistics_would_show():
    def rounded(view):
        return replace(view, push_exchange=CodedExchange(view.exchange.comm, view.exchange.codec))

    sums, reached = weight_sums(SAR(codec=BFloat16()), rounded)
    assert float((sums[reached] - 1).abs().max()) > 1e-3
