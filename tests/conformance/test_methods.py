"""Every method of the table: equal to its oracle and to dense matrices, in bytes and kept rows what its rule says."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from checkpoints import hashes, rows, train
from composing import configured
from conformance.methods import METHODS, NODES, SEED, WORLD, Bytes, Kept, Method, Priced, Two, drawn, three
from engines import Rank, on_ranks
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.uniform import Random
from gnnpar.config.compose import compose
from gnnpar.models.gcn import GCN
from gnnpar.parallel.bns.strategy import BoundarySampling
from gnnpar.parallel.digest.strategy import Digest
from gnnpar.parallel.sancus.strategy import Sancus
from gnnpar.settings import ConfigError
from gnnpar.verify.conformance import Outcome, check, make_job, relative_error, small_graph, train_in_threads
from worlds import Several, run_world

EPOCHS = 4


def each(field: str) -> list[Any]:
    """(name, entry) of every method that says something of `field`, or of each of several entries."""
    found = []
    for name, method in METHODS.items():
        value = getattr(method, field)
        entries = value if isinstance(value, list) else [method] if value else []
        found += [pytest.param(name, entry, id=f"{name}-{i}" if i else name) for i, entry in enumerate(entries)]
    return found


def trained(strategy: Any, config: Any, **options: Any) -> Outcome:
    return train_in_threads(strategy, config, small_graph(), **{"world": WORLD, **options})


@pytest.mark.parametrize(
    ("method", "setting", "config"),
    [
        pytest.param(method, setting, config, id=f"{name}-{setting}-{type(config).__name__}")
        for name, method in METHODS.items()
        for setting in method.inexact
        for config in method.models
    ],
)
def test_other_settings_equal_the_oracle(method: Method, setting: str, config: Any) -> None:
    case = check(method.inexact[setting], {"model": config}, worlds=(method.world,))[-1]
    assert case.reference == "its oracle"
    assert case.passed, case


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


@pytest.mark.parametrize(("name", "pair"), each("limits"))
def test_a_limit_has_the_bits_and_bytes_of_another_strategy(name: str, pair: tuple[Any, Any]) -> None:
    limit, other = (trained(strategy, three("gat")) for strategy in pair)
    assert (limit.losses, limit.traffic) == (other.losses, other.traffic)
    assert torch.equal(limit.logits, other.logits)


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


@pytest.mark.parametrize(("sent", "codec"), coded())
def test_bytes_are_those_of_the_rule(sent: Bytes | Priced, codec: Any) -> None:
    strategy = replace(sent.strategy, codec=codec)
    if isinstance(sent, Bytes):
        mine, theirs = (trained(s, three("gat"), epochs=3) for s in (strategy, replace(sent.twin, codec=codec)))
        for epoch, (ours, others) in enumerate(zip(mine.traffic, theirs.traffic, strict=True)):
            assert ours == {phase: n for phase, n in others.items() if sent.travels(phase, epoch)}
        assert mine.losses != theirs.losses
        return
    config = configured("model", "gcn", "model.hidden=32", "model.num_layers=3", "model.order=transform_first")
    job = make_job(strategy, config, small_graph(), world=sent.world, dtype=torch.float32)
    numbers = [sent.rows(job, epoch) for epoch in range(2)]
    assert (numbers[0] != numbers[1]) == sent.varies
    got = trained(strategy, config, world=sent.world, dtype=torch.float32)
    for number, epoch in zip(numbers, got.traffic, strict=True):
        price = sum(codec.price(number, [width]).nbytes for width in (32, 32, 3))
        for phase in ("forward", "backward"):
            if isinstance(codec, Random):  # its price is a mean
                assert 0.5 * price < epoch[phase] < 1.5 * price
            else:
                assert epoch[phase] == price


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


def test_processes_give_the_numbers_of_threads() -> None:
    pairs = [method.processes for method in METHODS.values() if method.processes]
    jobs = [make_job(strategy, config, small_graph(), world=WORLD, epochs=3) for strategy, config in pairs]
    ranks = run_world("gloo", WORLD, Several(tuple(jobs)))
    for i, (strategy, config) in enumerate(pairs):
        threads, mine = trained(strategy, config, epochs=3), [results[i] for results in ranks]
        assert mine[0][0] == threads.losses, strategy
        for epoch, expected in enumerate(threads.traffic):
            for phase in ("forward", "backward"):
                assert sum(rank[4][epoch].get(phase, 0) for rank in mine) == expected.get(phase, 0), strategy


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


@pytest.mark.parametrize(("name", "method"), each("resumed"))
def test_a_resumed_run_draws_the_same_numbers(name: str, method: Method, tmp_path: Path) -> None:
    common = (f"strategy={name}", *method.resumed)
    assert train(tmp_path / "whole", *common, "epochs=4").exit_code == 0
    assert train(tmp_path / "parted", *common, "epochs=2").exit_code == 0
    assert train(tmp_path / "parted", "resume=auto", *common, "epochs=4").exit_code == 0
    assert hashes(tmp_path / "parted") == hashes(tmp_path / "whole")
    assert rows(tmp_path / "parted") == rows(tmp_path / "whole")


def test_sums_of_drawn_rows_are_unbiased_over_epochs() -> None:
    part_of = torch.arange(NODES) % WORLD
    mean = torch.stack([drawn(part_of, 0.3, epoch) for epoch in range(2000)]).mean(0)
    # the standard error of an entry is sqrt(0.7 / 0.3 / 2000) = 0.034; 3600 entries
    assert (mean - 1).abs().max() < 5 * 0.034
