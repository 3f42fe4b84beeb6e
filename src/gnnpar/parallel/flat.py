"""One view, one forward, one backward, one reduction: every strategy without pipeline stages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from gnnpar.codecs.codec import Codec, SavedProfile
from gnnpar.comm import Communicator, Site
from gnnpar.data.tasks import Task
from gnnpar.models.gnn import GNN
from gnnpar.parallel.engine import EngineDefaults, EpochReport, Stateful, Stepper
from gnnpar.parallel.local import Pass
from gnnpar.partition.shard import Shard


class View(Protocol):
    """A Graph that can be told which pass it serves."""

    def during(self, run: Pass) -> Any: ...


class Structure(Protocol):
    """Blocks that a view holds beside the shard's."""

    @property
    def nbytes(self) -> int: ...


class FlatEngine(EngineDefaults):
    """`view` trains, `exact` evaluates and probes; they are the same where the strategy is exact.

    Parameters are replicated: gradients and the loss are summed over ranks in one message. `parts`: what else is kept
    between epochs, by the name under which a checkpoint has it; an exchange whose messages cross an epoch is one.
    """

    def __init__(
        self,
        *,
        view: View,
        exact: View,
        shard: Shard,
        model: GNN,
        task: Task,
        comm: Communicator,
        seed: int,
        codecs: Sequence[Codec] = (),
        held: dict | None = None,
        cache: dict | None = None,
        structure: Sequence[Structure] = (),
        parts: Mapping[str, Stateful] | None = None,
    ) -> None:
        self._view, self._exact, self._shard, self._model = view, exact, shard, model
        self._task, self._comm, self._seed, self._codecs = task, comm, seed, tuple(codecs)
        self._held, self._cache = held if held is not None else {}, cache if cache is not None else {}
        self._structure, self._parts = structure, dict(parts or {})
        self._train = shard.train_mask.nonzero().flatten()
        self._train_y = shard.y[self._train]

    @property
    def node_ids(self) -> Tensor:
        return self._shard.node_ids

    def train_epoch(self, epoch: int, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        with self._comm.clock("compute"):
            optimizer.zero_grad()
        return self.step(self.reduced_gradient(epoch), optimizer, keep_gradient=keep_gradient)

    def reduced_gradient(self, epoch: int) -> Tensor:
        """Training pass: all gradients and the loss, summed over ranks, in one vector."""
        self.drain()  # what is in flight was written with the codec's bits of the last epoch
        with self._comm.clock("encode"):
            for codec in self._codecs:
                codec.begin_epoch(epoch)
        with self._comm.clock("compute"):
            bucket = self._differentiate(self._view.during(Pass(self._seed, epoch, training=True)))
        bucket = self._comm.all_reduce(bucket, Site(epoch, -1, 0, "reduce"))
        self._comm.flush(keep=0)  # all was received before the sum: buffers of a pass end with it
        return bucket

    def step(self, bucket: Tensor, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        """One optimiser step with reduced gradients."""
        with self._comm.clock("compute"):
            gradients = self.gradients_of(bucket)
            kept = {name: g.clone() for name, g in gradients.items()} if keep_gradient else None
            for name, parameter in self.named_parameters():
                parameter.grad = gradients[name]
            optimizer.step()
            mean_loss = float(bucket[-1])
        facts = {name: value for codec in self._codecs for name, value in codec.facts().items()}
        return EpochReport(mean_loss, kept, facts)

    @torch.no_grad()
    def predict(self) -> Tensor:
        logits = self._model(self._exact.during(Pass(self._seed)), self._shard.x)
        self._comm.flush(keep=0)
        return logits

    def exact_gradient(self, epoch: int) -> dict[str, Tensor]:
        return self.gradients_of(self.exact_bucket(epoch))

    def exact_bucket(self, epoch: int) -> Tensor:
        """`reduced_gradient` without codec and account."""
        bucket = self._differentiate(self._exact.during(Pass(self._seed, epoch, training=True, probe=True)))
        bucket = self._comm.all_reduce(bucket)
        self._comm.flush(keep=0)
        return bucket

    def drain(self) -> None:
        for part in self._parts.values():
            part.drain()

    @property
    def profile(self) -> SavedProfile | None:
        return next((codec.profile for codec in self._codecs if codec.profile is not None), None)

    def live_bytes(self) -> dict[str, int]:
        cached = sum(t.numel() * t.element_size() for t in self._cache.values())
        return {
            "features": self._shard.features_nbytes,
            "structure": self._shard.structure_nbytes + sum(s.nbytes for s in self._structure),
            "halo": sum(self._held.values()) + cached + sum(part.nbytes for part in self._parts.values()),
            "history": 0,
            "host": 0,
        }

    def peak_elsewhere(self) -> int:
        return 0

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        return self._model.named_parameters()

    def state_dict(self) -> dict:
        codecs = [c.state_dict() for c in self._codecs]
        state = {"model": self._model.state_dict(), "codecs": codecs, "cache": dict(self._cache)}
        return state | {"parts": {n: part.state_dict() for n, part in self._parts.items()}} if self._parts else state

    def load_state_dict(self, state: dict) -> None:
        self._model.load_state_dict(state["model"])
        self._cache.update(state["cache"])  # views hold the same dictionary
        for codec, saved in zip(self._codecs, state["codecs"], strict=True):
            codec.load_state_dict(saved)
        for name, part in self._parts.items():
            part.load_state_dict(state["parts"][name])

    def _differentiate(self, graph: Any) -> Tensor:
        """Gradients of this rank's share of the loss, and the share."""
        logits = self._model(graph, self._shard.x)
        return self.bucket_of(self._task.loss_sum(logits[self._train], self._train_y) / self._shard.num_train)

    def bucket_of(self, loss: Tensor) -> Tensor:
        """All gradients of a loss, and the loss, in one vector; a parameter without a gradient counts as zero."""
        parameters = [p for _, p in self.named_parameters()]
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        parts = [torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)]
        return torch.cat([*(g.reshape(-1) for g in parts), loss.detach().reshape(1)])

    def gradients_of(self, bucket: Tensor) -> dict[str, Tensor]:
        """By parameter name: pieces of the vector of a pass."""
        parameters = dict(self.named_parameters())
        pieces = bucket[:-1].split([p.numel() for p in parameters.values()])
        return {name: piece.view_as(p) for (name, p), piece in zip(parameters.items(), pieces, strict=True)}
