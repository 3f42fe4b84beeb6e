"""Two trainings that must be the same, to the bit or to a tolerance, and refusals in one line."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import Tensor

from chunked import ByAutograd
from conftest import Run
from gnnpar.verify.conformance import Case, Job, Outcome, merge_ranks, relative_error
from worlds import run_world


def assert_same_bits(got: Outcome, expected: Outcome) -> None:
    """Losses, gradients of every epoch, and final logits."""
    assert got.losses == expected.losses
    assert torch.equal(got.logits, expected.logits)
    for mine, theirs in zip(got.gradients, expected.gradients, strict=True):
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[k], g) for k, g in theirs.items())


def assert_close(
    got: Outcome,
    losses: Sequence[float],
    gradients: Sequence[Mapping[str, Tensor]],
    *,
    of_losses: float = 1e-10,
    of_gradients: float = 1e-9,
) -> None:
    """Losses and gradients of every epoch, to relative tolerances."""
    assert got.losses == pytest.approx(losses, rel=of_losses)
    for mine, theirs in zip(got.gradients, gradients, strict=True):
        assert mine.keys() == theirs.keys()
        assert max(relative_error(mine[k], g) for k, g in theirs.items()) < of_gradients


def assert_equal(
    got: Outcome,
    expected: Outcome,
    tolerance: float = 1e-9,
    *,
    losses: float | None = None,
    logits: float | None = None,
) -> None:
    """Losses, gradients of every epoch, and final logits, to relative tolerances."""
    of_losses = tolerance if losses is None else losses
    assert_close(got, expected.losses, expected.gradients, of_losses=of_losses, of_gradients=tolerance)
    assert relative_error(got.logits, expected.logits) < (tolerance if logits is None else logits)


def assert_shards_train_alike(run: Run, folder: Path, graph: Sequence[str], *job: str) -> None:
    """On two ranks, from files in `folder`: a run from shards has the losses of one from the graph."""
    assert run("partition", *graph, "world_size=2", "out=cut").returncode == 0
    losses = []
    for source, name in ((graph, "whole"), (["shards=cut"], "from_shards")):
        how = ("strategy=graph_parallel", "world_size=2", "comm=threads", "epochs=2", f"hydra.run.dir={name}")
        done = run("train", *job, *source, *how)
        assert done.returncode == 0, done.stderr
        rows = (folder / name / "metrics.jsonl").read_text().splitlines()
        losses.append([json.loads(row)["loss/train"] for row in rows])
    assert losses[0] == losses[1]
    assert len(losses[0]) == 2


def assert_passed(cases: Sequence[Case]) -> None:
    """There are cases, and each has passed."""
    assert cases
    for case in cases:
        assert case.passed, case


def assert_equals_autograd(job: Job, *, refresh: int, fresh: float, stale: float = 0.0, shuffled: bool = True) -> None:
    """A pipeline in threads trains as plain autograd over the whole graph does with stale rows as constants."""
    got = merge_ranks(job, run_world("threads", job.plan.num_ranks, job))
    assert_close(got, *ByAutograd(job, refresh=refresh, fresh=fresh, stale=stale, shuffled=shuffled).train())


@contextmanager
def refused(line: str, kind: type[Exception] = ValueError) -> Iterator[None]:
    """The body raises `kind` in one line, in which the pattern `line` is found."""
    with pytest.raises(kind, match=line) as caught:
        yield
    assert "\n" not in str(caught.value)
