"""Reading .npy files from several threads: ranks that are threads read their shards at once."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

_PARSER = threading.Lock()


@contextmanager
def one_thread() -> Iterator[None]:
    """numpy parses headers with `ast`, whose count of nesting is shared by all threads: CPython 3.11.7 raises
    SystemError where two parse at once."""
    with _PARSER:
        yield


def load_npy(file: Path, *, mapped: bool = False) -> np.ndarray:
    """numpy.load without pickles. mapped: pages are read when used, and copied when written to."""
    with one_thread():
        return np.load(file, mmap_mode="c" if mapped else None, allow_pickle=False)
