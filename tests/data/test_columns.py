"""Threads read .npy files at once."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from gnnpar.data.columns import load_npy


class Circle:
    """Ends by collection: Python runs, and threads change, while numpy parses."""

    def __init__(self) -> None:
        self.itself = self

    def __del__(self) -> None:
        for _ in range(50):
            pass


def nested(depth: int, call: Callable[[], None]) -> None:
    call() if depth == 0 else nested(depth - 1, call)


def test_threads_at_different_depths_of_the_stack_read_what_was_saved(tmp_path: Path) -> None:
    file, expected = tmp_path / "rows.npy", np.arange(5)
    np.save(file, expected)
    errors: list[BaseException] = []

    def read() -> None:
        try:
            for _ in range(2000):
                for _ in range(20):
                    Circle()
                assert np.array_equal(load_npy(file), expected)
        except BaseException as error:
            errors.append(error)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=nested, args=(depth, read)) for depth in (0, 20, 50, 100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not errors
