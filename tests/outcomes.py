"""Two trainings that must be the same, to the bit or to a tolerance."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pytest
import torch
from torch import Tensor

from chunked import ByAutograd
from gnnpar.verify.conformance import Job, Outcome, merge_ranks, relative_error
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
        assert max(relative_error(mine[k], g) for k, g in theirs.items()) < of_gradients


def assert_equals_autograd(job: Job, *, refresh: int, fresh: float, stale: float = 0.0, shuffled: bool = True) -> None:
    """A pipeline in threads trains as plain autograd over the whole graph does with stale rows as constants."""
    got = merge_ranks(job, run_world("threads", job.plan.num_ranks, job))
    assert_close(got, *ByAutograd(job, refresh=refresh, fresh=fresh, stale=stale, shuffled=shuffled).train())
