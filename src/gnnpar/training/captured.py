"""launch.cuda_graph=true: capture one epoch as a CUDA graph, and replay it (ADR 48).

The host writes the dropout keys and the optimizer's numbers into tensors. The first epochs run uncaptured on the
stream of the capture, as torch requires, to compile kernels, allocate workspaces and connect communicators. The capture
is thread-local, because NCCL's watchdog runs in another thread. A replay measures no phases, and reports the bytes of
the captured epoch. It also repeats numbers in Python attributes of modules: if one changes between two epochs, in
forward or in a callback, all further epochs run uncaptured.
"""

from __future__ import annotations

from torch import Tensor, cuda, nn

from gnnpar.comm import Communicator
from gnnpar.comm.ledger import EpochTraffic
from gnnpar.models.pyg.nested import python_state
from gnnpar.parallel.engine import Capturable, EpochReport
from gnnpar.parallel.keys import KeyTable
from gnnpar.settings import Stepper
from gnnpar.training.result.header import WARMUP_EPOCHS

WARM_UP = WARMUP_EPOCHS
"""Epochs before the capture, also left out of timing statistics."""


class _Launches:
    """An optimizer that only launches its step, which the host prepared before the epoch."""

    def __init__(self, optimizer: Stepper) -> None:
        self._optimizer = optimizer

    @property
    def refused(self) -> bool:
        return self._optimizer.refused

    def zero_grad(self) -> None:
        self._optimizer.zero_grad()

    def step(self, norm: float | None = None) -> None:
        self._optimizer.launch(norm)


class CapturedEpochs:
    """Captured epochs of one engine on one GPU. All ranks capture and replay the same epochs.

    `captures`: True if the next epoch will be captured; its time does not count.
    """

    def __init__(self, engine: Capturable, optimizer: Stepper, comm: Communicator, seed: int, model: nn.Module) -> None:
        self._engine, self._optimizer, self._comm, self._model = engine, optimizer, comm, model
        self._keys = KeyTable(seed, comm.device)
        self._stream = cuda.Stream(comm.device)
        self._graph: cuda.CUDAGraph | None = None
        self._loss: Tensor | None = None  # written by each replay
        self._traffic: EpochTraffic | None = None  # of one replay
        self._state: dict[str, object] = {}  # of modules, before the last epoch
        self._done, self._changes = 0, False

    @property
    def captures(self) -> bool:
        return self._graph is None and self._done >= WARM_UP and not self._changes

    def train_epoch(self, epoch: int) -> EpochReport:
        """Train one epoch, bit for bit as `Engine.train_epoch`. The host waits for its loss."""
        self._keys.fill(epoch)
        self._optimizer.prepare()
        state = python_state(self._model)
        if self._done > 1 and state != self._state:  # the first epoch may set modules up
            self._changes, self._graph = True, None
        self._state = state
        loss = self._replayed(epoch) if self._graph is not None or self.captures else self._launched(epoch)
        self._done += 1
        return EpochReport(float(loss))

    def _launched(self, epoch: int) -> Tensor:
        self._stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._stream):
            loss = self._engine.launch_epoch(epoch, _Launches(self._optimizer), self._keys)
        cuda.current_stream().wait_stream(self._stream)
        return loss

    def _replayed(self, epoch: int) -> Tensor:
        if self._graph is None:
            self._capture(epoch)
        assert self._graph is not None
        assert self._loss is not None
        assert self._traffic is not None
        with self._comm.clock("compute"):
            self._graph.replay()
        self._comm.ledger.repeat(self._traffic)
        return self._loss

    def _capture(self, epoch: int) -> None:
        self._comm.ledger.drain()
        graph = cuda.CUDAGraph()
        with self._comm.clock.paused(), cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            self._loss = self._engine.launch_epoch(epoch, _Launches(self._optimizer), self._keys)
        self._traffic, self._graph = self._comm.ledger.drain(), graph


def captured_epochs(
    engine: object, optimizer: Stepper, comm: Communicator, seed: int, model: nn.Module
) -> CapturedEpochs:
    """Return the captured epochs of an engine. Raise TypeError if it has no launch_epoch. model: its modules."""
    if not isinstance(engine, Capturable):
        raise TypeError(
            f"{type(engine).__name__} has no launch_epoch, and its strategy declares captured=True; add it, or declare "
            "captured=False"
        )
    return CapturedEpochs(engine, optimizer, comm, seed, model)
