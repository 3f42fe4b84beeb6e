"""Checkpoints: a resumed run is the uninterrupted one bit for bit, and nothing that is broken or foreign gets in."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from checkpoints import ADAPTIVE, hashes, last, result, rows, strategy_of, train
from composing import names
from gnnpar.runner.keeping import Keeper
from gnnpar.runner.launch import Outcome

# beside every YAML of conf/strategy: state that only some settings have
VARIANTS = {
    "random bits": ("strategy=graph_parallel", "codec=random", "codec.period=3"),
    "uniform bits": ("strategy=sar", "codec=uniform", "codec.bits=4"),
    "kept features": ("strategy=graph_parallel", "first_layer=cached", "model=gat", "codec=bf16"),
    "kept sums, adaptive": ("strategy=adaqp", "first_layer=cached", *ADAPTIVE),
    "out of core": ("strategy=sar", "strategy.logical_parts=3", "model=gat"),
    "out of core, adaptive": ("strategy=sar", "strategy.logical_parts=3", "codec=adaptive", "codec.period=2",
                              "codec.warmup=1", "codec.trace_epochs=2"),
    "rounds of peers": ("strategy=sar", "strategy.rounds=peer", "strategy.backward=pull", "model=gat", "world_size=3"),
    "momentum and warm-up": ("strategy=graph_parallel", "optim=sgd", "optim.momentum=0.9", "optim.schedule=cosine",
                             "optim.warmup_epochs=2"),
}  # fmt: skip


CASES = {name: strategy_of(name) for name in names("strategy")} | VARIANTS


@pytest.fixture
def interrupt(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Outcome]:
    """Trains until the end of an epoch in which the run is asked to end."""

    def train_until(folder: Path, done: int, *overrides: str) -> Outcome:
        decide = Keeper.decide

        def asked(self, comm, now, everyone, *, ends):
            told = everyone and [{**each, "asked": now == done} for each in everyone]
            return decide(self, comm, now, told, ends=ends)

        with monkeypatch.context() as patch:
            patch.setattr(Keeper, "decide", asked)
            return train(folder, *overrides)

    return train_until


@pytest.mark.parametrize("case", CASES)
def test_a_resumed_run_is_the_uninterrupted_one(tmp_path: Path, interrupt, case: str) -> None:
    common = (*CASES[case], "epochs=6", "fidelity_every=4")
    whole, parted = tmp_path / "whole", tmp_path / "parted"
    assert train(whole, *common).exit_code == 0
    for done in (2, 3):
        outcome = interrupt(parted, done, "resume=auto", *common)
        assert (outcome.status, outcome.error) == ("interrupted", "interrupted by a signal")
        assert len(rows(parted)) == done == last(parted).epoch
    assert train(parted, "resume=auto", *common).exit_code == 0
    assert rows(parted) == rows(whole)
    assert hashes(parted) == hashes(whole)
    assert result(parted)["metric"] == result(whole)["metric"]
