"""What glibc does with memory that is freed: an epoch allocates what the last one freed, so a rank keeps it.

By itself glibc maps rows above a moving threshold (32 MiB at most) anew and returns them at once, and trims the top of
its heap: the kernel zeroes each page again in every epoch (GCN 3 x 128 of 80,000 nodes, 1 thread: 210,000 faults an
epoch and 0.95 CPU seconds; kept, 1 and 0.51). Live bytes stay the same. The resident set stays at its highest, and was
1.5 times as large: up to glibc 2.37, aligned rows do not fit a hole of exactly their size. What users set themselves
(MALLOC_TRIM_THRESHOLD_ and its like, GLIBC_TUNABLES) comes first.
"""

from __future__ import annotations

import ctypes
import logging
import os

_LOG = logging.getLogger(__name__)
_TRIM_THRESHOLD, _TOP_PAD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -2, -3, -8  # of mallopt
_VARIABLES = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_"}
_MOST, _DEFAULT = 2**31 - 1, 128 << 10


def keep_freed() -> None:
    """Freed memory stays with this process, for all its threads."""
    own = sorted(_VARIABLES & os.environ.keys())
    own += ["GLIBC_TUNABLES"] if "glibc.malloc." in os.environ.get("GLIBC_TUNABLES", "") else []
    if own:
        _LOG.debug("the allocator stays as %s set it", " and ".join(own))
    elif _set({_MMAP_THRESHOLD: _MOST, _TRIM_THRESHOLD: _MOST, _TOP_PAD: 64 << 20}):
        _LOG.debug("the allocator keeps what is freed")


def return_freed(*, above: int) -> None:
    """What is freed above a size in bytes leaves the process, and threads share what is below: with an arena each, all
    would keep what only the running one needs."""
    _set({_ARENA_MAX: 1, _MMAP_THRESHOLD: above, _TRIM_THRESHOLD: _DEFAULT, _TOP_PAD: _DEFAULT})


def _set(options: dict[int, int]) -> bool:
    """Was it glibc, and did it take all?"""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # musl, macOS, a static interpreter
        _LOG.debug("the allocator is not glibc's: what it does with freed memory stays")
        return False
    refused = [option for option, value in options.items() if not mallopt(option, value)]
    if refused:
        _LOG.debug("the allocator refused options %s of mallopt", refused)
    return not refused
