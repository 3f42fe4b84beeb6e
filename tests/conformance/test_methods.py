"""Every method of the table: equal to its oracle and to dense matrices, in bytes and kept rows what its rule says."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import hashes, rows, train
from composing import PRESETS, configured, names
from conformance.methods import METHODS, NODES, SEED, WORLD, Bytes, Kept, Method, Priced, Same, Two, drawn, four, three
from engines import Rank, on_ranks
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import BFloat16, Drop
from gnnpar.codecs.uniform import Random
from gnnpar.comm import ThreadWorld
from gnnpar.config.compose import compose
from gnnpar.models.gcn import GCN
from gnnpar.parallel.bns.strategy import BoundarySampling
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.digest.strategy import Digest
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.sancus.strategy import Sancus
from gnnpar.parallel.single.strategy import Single
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import (
    Outcome,
    check,
    make_job,
    merge_ranks,
    relative_error,
    small_graph,
    train_in_threads,
)
from outcomes import assert_equal, assert_same_bits
from worlds import Several, run_world

EPOCHS = 4


def each(field: str) -> list[Any]:
    """(name, entry) of every method that says something of `field`, or of each of several entries."""
    found = []
    for name, method in METHODS.items():
        value = getattr(method, field)
        for i, entry in enumerate(value if isinstance(value, list) else [method] if value else []):
            marks = pytest.mark.slow if isinstance(entry, Same) and entry.slow else ()
            found.append(pytest.param(name, entry, marks=marks, id=f"{name}-{i}" if i else name))
    return found


@cache
def trained(strategy: Any, config: Any, **options: Any) -> Outcome:
    """Train once for all tests; without a fault in gnnpar."""
    return train_in_threads(strategy, config, small_graph(), **{"world": WORLD, **options})


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("method", "setting", "config"),
    [
        pytest.param(method, setting, model, id=f"{name}-{setting}-{type(model).__name__}")
        for name, method in METHODS.items()
        for setting, model in product(method.inexact, method.models)
    ],
)
def test_other_settings_equal_the_oracle(method: Method, setting: str, config: Any) -> None:
    case = check(method.inexact[setting], {"model": config}, worlds=(method.world,))[-1]
    assert case.reference == "its oracle"
    assert case.passed, case


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "method"), each("fault"))
def test_a_fault_is_noticed(name: str, method: Method, monkeypatch: pytest.MonkeyPatch) -> None:
    assert method.fault is not None and method.faulty is not None
    method.fault(monkeypatch)
    strategy, config = method.faulty
    case = check(strategy, {"model": config}, worlds=(WORLD,))[-1]
    assert case.reference == method.reference
    assert not case.passed


@pytest.mark.parametrize(("name", "method"), each("dense"))
def test_gradients_are_those_of_dense_matrices(name: str, method: Method) -> None:
    assert method.dense is not None
    strategy, dense = method.dense
    job = make_job(strategy, GCN(hidden=8), small_graph(), world=WORLD, seed=SEED, epochs=EPOCHS)
    torch.manual_seed(1)
    model = Two().double()
    got = on_ranks(job, lambda rank: [dict(report.gradient or {}) for report in rank.train(EPOCHS)], model)[0]
    for mine, expected in zip(got, dense(job.plan.part_of).train(model, EPOCHS), strict=True):
        for gradient, (parameter, _) in zip(expected, model.named_parameters(), strict=True):
            assert relative_error(mine[parameter], gradient) < dense.tolerance


@pytest.mark.quick(6)
@pytest.mark.parametrize(("name", "same"), each("same"))
def test_bits_are_those_of_another_way_to_run(name: str, same: Same) -> None:
    mine, other = (
        trained(strategy, same.config, world=world, epochs=same.epochs, dtype=same.dtype)
        for strategy, world in ((same.strategy, same.world), (same.twin, same.of_twin))
    )
    assert_same_bits(mine, other)
    for ours, theirs in zip(mine.traffic, other.traffic, strict=True):
        phases = ours.keys() | theirs.keys() if same.phases is None else same.phases
        assert {phase: ours.get(phase) for phase in phases} == {phase: theirs.get(phase) for phase in phases}


def coded() -> list[Any]:
    """(what is sent, codec)."""
    found = []
    for name, method in METHODS.items():
        for i, sent in enumerate(method.sent):
            slow = sent.slow if isinstance(sent, Bytes) else ()
            for codec in (*sent.codecs, *slow):
                marks = pytest.mark.slow if codec in slow else ()
                found.append(pytest.param(sent, codec, marks=marks, id=f"{name}-{i}-{type(codec).__name__}"))
    return found


@pytest.mark.quick(3)
@pytest.mark.parametrize(("sent", "codec"), coded())
def test_bytes_are_those_of_the_rule(sent: Bytes | Priced, codec: Any) -> None:
    strategy = replace(sent.strategy, codec=codec)
    if isinstance(sent, Bytes):
        mine, theirs = (trained(s, three("gat"), epochs=3) for s in (strategy, replace(sent.twin, codec=codec)))
        for epoch, (ours, others) in enumerate(zip(mine.traffic, theirs.traffic, strict=True)):
            assert ours == {phase: n for phase, n in others.items() if sent.travels(phase, epoch)}
        assert mine.losses != theirs.losses
        return
    job = make_job(strategy, sent.config, small_graph(), world=sent.world, dtype=torch.float32)
    numbers = [sent.rows(job, epoch) for epoch in range(2)]
    assert (numbers[0] != numbers[1]) == sent.varies
    got = trained(strategy, sent.config, world=sent.world, dtype=torch.float32)
    for number, epoch in zip(numbers, got.traffic, strict=True):
        for phase in ("forward", "backward"):
            price = sum(codec.price(number, [width], gradient=phase == "backward").nbytes for width in sent.widths)
            if isinstance(codec, Random):  # its price is a mean
                assert 0.5 * price < epoch[phase] < 1.5 * price
            else:
                assert epoch[phase] == price


@pytest.mark.quick(2)
@pytest.mark.parametrize(("name", "keeps"), each("keeps"))
def test_rows_kept_between_epochs_have_the_bytes_of_the_rule(name: str, keeps: Kept) -> None:
    job = make_job(keeps.strategy, three(keeps.model), small_graph(), world=WORLD, epochs=keeps.epochs)

    def held(rank: Rank) -> tuple[int, int]:
        rank.train(keeps.epochs)
        if keeps.drains:
            rank.engine.drain()
        return rank.engine.live_bytes()["halo"], keeps.nbytes(rank)

    for found, expected in on_ranks(job, held):
        assert found == expected


@pytest.mark.quick(1)
@pytest.mark.parametrize("world", [WORLD, 4])
def test_processes_give_the_numbers_of_threads(world: int) -> None:
    """Real messages in real order."""
    places = [place for method in METHODS.values() for place in method.processes if place[2] == world]
    jobs = [make_job(strategy, config, small_graph(), world=world, epochs=3) for strategy, config, _ in places]
    ranks = run_world("gloo", world, Several(tuple(jobs)))
    for i, job in enumerate(jobs):
        got, threads = (
            merge_ranks(job, [results[i] for results in ranks]),
            merge_ranks(job, ThreadWorld(world).run(job)),
        )
        adds = isinstance(job.strategy, Cagnet) and world == 4  # gloo adds four losses in another order
        assert_equal(got, threads, 1e-12)
        assert got.losses == (pytest.approx(threads.losses, rel=1e-14, abs=0) if adds else threads.losses)
        for mine, expected in zip(got.traffic, threads.traffic, strict=True):
            mine.pop("evaluate", None)  # the job before predicted on the same communicators
            assert mine == expected, job.strategy


EVALUATED = {
    name: configured("strategy", name) for name in names("strategy") if name not in {"single", "tag", *PRESETS}
}
EVALUATED |= {
    "bf16": GraphParallel(codec=BFloat16()),
    "drop": GraphParallel(codec=Drop()),
    "hybrid, drop": Hybrid(stages=2, parts=2, chunks=8, codec=Drop()),
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", EVALUATED)
def test_evaluation_is_exact(name: str) -> None:
    """Whatever is sent in training: chunks, samples, parts without edges, rounded rows or none."""
    strategy, config = EVALUATED[name], four("gcn")
    world = strategy.capabilities.max_ranks or 4
    got = trained(strategy, config, world=world, epochs=0)
    assert relative_error(got.logits, trained(Single(), config, world=1, epochs=0).logits) < 1e-12


@pytest.mark.quick(9)
@pytest.mark.parametrize(("name", "case"), each("refused"))
def test_what_cannot_run_is_refused_in_one_line(name: str, case: tuple[Any, str]) -> None:
    how, line = case
    with pytest.raises(ValueError if callable(how) else ConfigError, match=line) as caught:
        how() if callable(how) else compose([f"strategy={name}", *how])
    assert "\n" not in str(caught.value)


def test_what_is_exact_takes_what_the_method_refuses() -> None:
    assert Digest(period=1, gradients=True, codec=Adaptive()).exactness == {"quantized"}
    assert BoundarySampling(rate=1.0, codec=Adaptive()).exactness == {"quantized"}
    Sancus(period=5, bound=0.1).check(2, 2, 4)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("name", "overrides"), each("resumed"))
def test_a_resumed_run_draws_the_same_numbers(name: str, overrides: tuple[str, ...], tmp_path: Path) -> None:
    common = (f"strategy={name}", *overrides)
    assert train(tmp_path / "whole", *common, "epochs=6").exit_code == 0
    assert train(tmp_path / "parted", *common, "epochs=4").exit_code == 0
    assert train(tmp_path / "parted", "resume=auto", *common, "epochs=6").exit_code == 0
    assert hashes(tmp_path / "parted") == hashes(tmp_path / "whole")
    assert rows(tmp_path / "parted") == rows(tmp_path / "whole")


@pytest.mark.slow
def test_sums_of_drawn_rows_are_unbiased_over_epochs() -> None:
    part_of = torch.arange(NODES) % WORLD
    mean = torch.stack([drawn(part_of, 0.3, epoch) for epoch in range(2000)]).mean(0)
    # the standard error of an entry is sqrt(0.7 / 0.3 / 2000) = 0.034; 3600 entries
    assert (mean - 1).abs().max() < 5 * 0.034
