"""Streams and events of a GPU that is not there, and what they do in the order of calls."""

from __future__ import annotations

import itertools
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import pytest
import torch


class Log(list[str]):
    """What streams, events and copies did; kernels are noted by the tests. pinned: of each tensor that was made."""

    def __init__(self, patch: pytest.MonkeyPatch, module: ModuleType) -> None:
        """Take the place of `torch.cuda` in `module`, and of the copies of tensors."""
        super().__init__()
        log, current, names, numbers = self, ["main"], iter(["out", "in"]), itertools.count()
        self.pinned: list[bool] = []

        class Stream:
            def __init__(self, device=None, name=None):
                self.name = name or next(names)

            def wait_stream(self, other):
                log.append(f"{self.name} waits for {other.name}")

            def wait_event(self, event):
                log.append(f"{self.name} waits for {event.name}")

        class Event:
            def record(self, stream):
                self.name = f"event {next(numbers)} of {stream.name}"

            def synchronize(self):
                log.append(f"host waits for {self.name}")

        @contextmanager
        def stream(chosen):
            current.append(chosen.name)
            yield
            current.pop()

        fake = SimpleNamespace(Stream=Stream, Event=Event, stream=stream)
        fake.current_stream = lambda: Stream(name=current[-1])
        patch.setattr(module, "cuda", fake)
        copy, empty = torch.Tensor.copy_, torch.empty

        def copied(into, data, *, non_blocking=False):
            assert non_blocking
            log.append(f"copy of {len(data)} bytes on {current[-1]}")
            return copy(into, data)

        def moved(data, device, *, non_blocking):
            return copied(empty(data.shape, dtype=data.dtype), data, non_blocking=non_blocking)

        def made(*size, pin_memory=False, **options):
            log.pinned.append(pin_memory)
            return empty(*size, **options)

        patch.setattr(torch.Tensor, "copy_", copied)
        patch.setattr(torch.Tensor, "to", moved)
        patch.setattr(torch.Tensor, "record_stream", lambda t, s: log.append(f"{len(t)} bytes are used on {s.name}"))
        patch.setattr(torch, "empty", made)
