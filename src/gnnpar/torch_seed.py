"""torch's own generator, for code that draws from nothing else: one user at a time, and as it was afterwards."""

# torch declares no types of its random state
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from gnnpar.locks import ThreadLock

_ONE_AT_A_TIME = ThreadLock()


@contextmanager
def torch_seeded(seed: int) -> Iterator[None]:
    """Numbers drawn from torch's generator within depend on `seed` alone, also where ranks are threads, which share it.

    A rank that draws from it outside of this changes what another one draws within.
    """
    with _ONE_AT_A_TIME, torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
