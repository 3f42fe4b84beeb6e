"""Seed torch's global generator for a block of code, and restore it."""

# torch declares no types of its random state
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch

_ONE_AT_A_TIME = threading.RLock()


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Numbers drawn from torch's generator within depend on `seed` alone, also where ranks are threads, which share it.

    A rank that draws from it outside of this changes what another one draws within.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
