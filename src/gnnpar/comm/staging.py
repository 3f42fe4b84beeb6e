"""Copies between a GPU and pinned host memory, on separate streams, for gloo.

Out: the copies of an exchange wait for the kernels that made the buffers, not for later ones; one event marks the end
of all. In: a copy does not wait for kernels launched meanwhile, and only its readers wait for it.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, cuda


class Staging:
    """Copies of one device. On a CPU nothing is copied."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        on_gpu = device.type == "cuda"
        self._out, self._in = (cuda.Stream(device), cuda.Stream(device)) if on_gpu else (None, None)

    def to_host(self, buffers: Mapping[int, Tensor]) -> dict[int, Tensor]:
        """Copy buffers to the host, and wait, since gloo reads them at once."""
        if self._out is None or not buffers:
            return dict(buffers)
        self._out.wait_stream(cuda.current_stream())
        on_host: dict[int, Tensor] = {}
        with cuda.stream(self._out):
            for peer, buffer in buffers.items():
                on_host[peer] = torch.empty(buffer.shape, dtype=buffer.dtype, pin_memory=True)
                on_host[peer].copy_(buffer, non_blocking=True)
                buffer.record_stream(self._out)
            arrived = cuda.Event()
            arrived.record(self._out)
        arrived.synchronize()
        return on_host

    def to_device(self, buffer: Tensor) -> Tensor:
        """Copy a pinned buffer to the device. The host does not wait; the current stream does."""
        if self._in is None:
            return buffer
        with cuda.stream(self._in):
            on_device = buffer.to(self._device, non_blocking=True)
        cuda.current_stream().wait_stream(self._in)
        on_device.record_stream(cuda.current_stream())
        return on_device
