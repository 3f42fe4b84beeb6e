"""What may never answer, done beside this thread."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(seconds: float, act: Callable[[], T], *, name: str, more: Callable[[], bool] = lambda: False) -> T:
    """What `act` returns, or raises; TimeoutError where it takes longer, or where, after each such time, not `more()`.
    Its thread, `name`, is then left behind, and ends with the process."""
    made: list[T] = []
    trouble: list[BaseException] = []

    def guarded() -> None:
        try:
            made.append(act())
        except BaseException as error:
            trouble.append(error)

    thread = threading.Thread(target=guarded, name=name, daemon=True)
    thread.start()
    thread.join(seconds)
    while thread.is_alive() and more():
        thread.join(seconds)
    if thread.is_alive():
        raise TimeoutError(f"no answer within {seconds:g} s")
    if trouble:
        raise trouble[0]
    return made[0]
