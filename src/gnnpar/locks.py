"""Locks of a process, which a forked child does not wait for: the thread that held one is not there."""

from __future__ import annotations

import os
import threading


class ThreadLock:
    """One thread at a time is in `with`, and may be so again within."""

    def __init__(self) -> None:
        self._renew()
        os.register_at_fork(after_in_child=self._renew)

    def _renew(self) -> None:
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()
