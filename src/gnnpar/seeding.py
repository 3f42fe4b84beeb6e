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
    """Context manager: seed torch's generator, and restore it.

    One thread at a time: ranks that are threads share the generator.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
