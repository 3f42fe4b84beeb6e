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
from gnnpar.parallel.engine import EpochReport, FlatEngine
from gnnpar.parallel.local import KeyTable
from gnnpar.settings import Stepper
from gnnpar.training.result.result import WARMUP_EPOCHS


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

    model: the modules of the engine. captures: True if the next epoch will be captured; its time does not count. Raises
    TypeError for an engine without launch_epoch.
    """

    def __init__(self, engine: object, optimizer: Stepper, comm: Communicator, seed: int, model: nn.Module) -> None:
        if not isinstance(engine, FlatEngine):
            raise TypeError(
                f"{type(engine).__name__} has no launch_epoch, and its strategy declares captured=True; add it, or "
                "declare captured=False"
            )
        self._engine, self._optimizer, self._comm, self._model = engine, optimizer, comm, model
        self._keys = KeyTable(seed, comm.device)
        self._stream = cuda.Stream(comm.device)
        self._captured: tuple[cuda.CUDAGraph, Tensor, EpochTraffic] | None = None  # with loss and traffic of a replay
        self._state: dict[str, object] = {}  # of modules, before the last epoch
        self._done, self._changes = 0, False

    @property
    def captures(self) -> bool:
        return self._captured is None and self._done >= WARMUP_EPOCHS and not self._changes

    def train_epoch(self, epoch: int) -> EpochReport:
        """Train one epoch, bit for bit as `Engine.train_epoch`. The host waits for its loss."""
        self._keys.fill(epoch)
        self._optimizer.prepare()
        state = python_state(self._model)
        if self._done > 1 and state != self._state:  # the first epoch may set modules up
            self._changes, self._captured = True, None
        self._state = state
        if self.captures:
            self._captured = self._capture(epoch)
        loss = self._launched(epoch) if self._captured is None else self._replayed(*self._captured)
        self._done += 1
        return EpochReport(float(loss))

    def _launched(self, epoch: int) -> Tensor:
        self._stream.wait_stream(cuda.current_stream())
        with cuda.stream(self._stream):
            loss = self._engine.launch_epoch(epoch, _Launches(self._optimizer), self._keys)
        cuda.current_stream().wait_stream(self._stream)
        return loss

    def _replayed(self, graph: cuda.CUDAGraph, loss: Tensor, traffic: EpochTraffic) -> Tensor:
        with self._comm.clock("compute"):
            graph.replay()
        self._comm.ledger.repeat(traffic)
        return loss

    def _capture(self, epoch: int) -> tuple[cuda.CUDAGraph, Tensor, EpochTraffic]:
        self._comm.ledger.drain()
        graph = cuda.CUDAGraph()
        with self._comm.clock.paused(), cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            loss = self._engine.launch_epoch(epoch, _Launches(self._optimizer), self._keys)
        return graph, loss, self._comm.ledger.drain()
