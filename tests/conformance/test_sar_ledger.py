"""What SAR sends and holds, as formulas of the partition: 2C for linear folds, 3C pulled, C + T (F + 3H) pushed."""

import time
import weakref
from itertools import product

import pytest
import torch

from composing import configured
from engines import on_ranks
from gnnpar.codecs.codec import BFloat16
from gnnpar.comm import CodedExchange
from gnnpar.parallel.engine import FlatEngine
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.sequential.view import SequentialGraph
from gnnpar.verify.conformance import make_job, small_graph, train_in_threads

F, HIDDEN, CLASSES, HEADS, WORLD = 6, 8, 3, 2, 4
ATTENTION = [(HIDDEN, HEADS)] * 2 + [(CLASSES, 1)]  # (F, H) of every layer
LINEAR = {  # (width forward, width backward) of every layer; backward is 0 where the input needs no gradient
    "gcn": [(F, 0), (HIDDEN, HIDDEN), (CLASSES, CLASSES)],
    "sage_max": [(F, 0), (HIDDEN, HIDDEN), (HIDDEN, HIDDEN)],
    "gcnii": [(HIDDEN, HIDDEN)] * 3,
}
TINY = 400 / 2**20


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
    phases = ("forward", "backward", "remat", "push")
    per_epoch = [{phase: epoch.get(phase, 0) for phase in phases} for epoch in got.traffic]
    assert per_epoch[0] == per_epoch[1]
    return per_epoch[0]


@pytest.mark.quick(3)
@pytest.mark.parametrize(("model", "rounds"), product(LINEAR, ["part", "one", TINY]))
def test_folds_that_need_no_row_twice_send_2c(model, rounds):
    strategy = SAR(rounds=rounds)
    halo, _ = counts(strategy, model)
    forward, backward = (8 * halo * sum(widths) for widths in zip(*LINEAR[model], strict=True))
    assert sent(strategy, model) == {"forward": forward, "backward": backward, "remat": 0, "push": 0}


@pytest.mark.quick(1)
@pytest.mark.parametrize("rounds", ["part", "one", TINY])
def test_pulled_attention_sends_3c(rounds):
    strategy = SAR(rounds=rounds, backward="pull")
    halo, _ = counts(strategy, "gat")
    once = 8 * halo * sum(f + h for f, h in ATTENTION)
    assert sent(strategy, "gat") == {"forward": once, "backward": once, "remat": once, "push": 0}
    kept = sent(SAR(rounds=rounds, backward="pull", remat=False), "gat")
    assert kept == {"forward": once, "backward": once, "remat": 0, "push": 0}


@pytest.mark.quick(1)
@pytest.mark.parametrize("rounds", ["part", "one", TINY])
def test_pushed_attention_sends_a_row_of_f_and_3h_back(rounds):
    halo, pushed = counts(SAR(rounds=rounds), "gat")
    forward = 8 * halo * sum(f + h for f, h in ATTENTION)
    push = 8 * pushed * sum(f + 3 * h for f, h in ATTENTION)
    assert sent(SAR(rounds=rounds), "gat") == {"forward": forward, "backward": 0, "remat": 0, "push": push}


def test_a_rounding_codec_leaves_pushed_statistics_whole():
    strategy = SAR(codec=BFloat16())
    halo, pushed = counts(strategy, "gat")
    forward = 2 * halo * sum(f + h for f, h in ATTENTION)
    push = pushed * sum(2 * f + 4 * 3 * h for f, h in ATTENTION)
    found = sent(strategy, "gat", torch.float32)
    assert found == {"forward": forward, "backward": 0, "remat": 0, "push": push}


def test_your_own_fold_pulls_in_push_mode_too():
    strategy = SAR()
    halo, _ = counts(strategy, "gatv2")
    once = 8 * halo * (HIDDEN + HIDDEN + CLASSES)
    assert sent(strategy, "gatv2") == {"forward": once, "backward": once, "remat": once, "push": 0}


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
        rows = sum(schedule.pulled[rank])
        assert total - resident == 8 * rows * sum(f + h for f, h in ATTENTION)


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
