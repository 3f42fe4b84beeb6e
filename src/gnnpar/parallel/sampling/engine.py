"""Many steps per epoch, each on a subgraph with some training nodes (seeds): X[seeds and around] -> loss of seeds.

All ranks step together: a batch is dealt out over them and gradients are summed in one message, so that a step equals
that of one rank with the whole batch. A rank without a seed in a batch takes part with zeros. While a step trains, a
thread draws the sample of the next one, or worker processes draw further ahead.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from gnnpar.comm import MessageTag
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import EpochReport, FlatEngine, Stepper
from gnnpar.parallel.halo_graph import exact_view
from gnnpar.parallel.local import Pass
from gnnpar.parallel.sampling.batches import At, Batches
from gnnpar.parallel.sampling.neighbours import Replica
from gnnpar.parallel.sampling.view import SampledGraph, Subgraph, first_rows
from gnnpar_kernels import fold_key

_MASKS = 3  # the use of a key; batches.py has the others


class MinibatchEngine(FlatEngine):
    """Train on samples; evaluate and probe on the whole graph. `hops`: aggregations of each layer.

    The gradient kept for the probe is the mean over the batches of an epoch at its first weights, with the masks of the
    exact gradient.
    """

    def __init__(
        self,
        context: BuildContext,
        *,
        graph: Replica,
        batches: Batches,
        hops: Sequence[int],
        num_workers: int,
    ) -> None:
        exact = exact_view(context)
        super().__init__(context, view=exact, exact=exact)
        self._task, self._graph, self._batches, self._hops = context.task, graph, batches, tuple(hops)
        self._steps: list[At] = []  # steps of the epoch, in the order of drawing
        self._held = 0
        self._workers: DataLoader[Subgraph] | None = None
        if num_workers:
            self._workers = DataLoader(
                batches,  # pyright: ignore[reportArgumentType]  # torch asks for its own class, and needs two methods
                batch_size=None,
                sampler=self._steps,
                num_workers=num_workers,
                # if a program asks for spawn elsewhere, Python would import modules of the working directory
                multiprocessing_context="fork" if sys.platform == "linux" else None,
                persistent_workers=True,
                collate_fn=_identity,  # pyright: ignore[reportArgumentType]  # without a batch it gets one item
                generator=torch.Generator(),
            )

    def train_epoch(self, epoch: int, optimizer: Stepper, *, keep_gradient: bool = False) -> EpochReport:
        sizes = [self._batches.size((epoch, step)) for step in range(len(self._batches))]
        total, several, loss, nodes, edges = sum(sizes), len(sizes) > 1, 0.0, 0, 0
        kept = self._mean_gradient(epoch, total) if keep_gradient and several else None
        for (step, size), sub in zip(enumerate(sizes), self._subgraphs(epoch), strict=True):
            with self._comm.clock("compute"):
                optimizer.zero_grad()
                run = Pass(self._seed if step == 0 else fold_key(self._seed, step, _MASKS), epoch, training=True)
                bucket = self._differentiate_batch(sub, run, size)
            bucket = self._comm.all_reduce(bucket, MessageTag(epoch, -1, step, "reduce"))
            report = self.step(bucket, optimizer, keep_gradient=keep_gradient and not several)
            loss += report.loss * size / total
            nodes, edges, kept = nodes + len(sub.node_ids), edges + len(sub.indices), kept or report.gradient
            if optimizer.refused:  # on every rank: all have the same gradient
                break
        facts = {"steps": len(sizes), "nodes": nodes, "edges": edges, "sampler": self._batches.drawn_by}
        return EpochReport(loss, kept, {f"sample/{name}": value for name, value in facts.items()})

    def live_bytes(self) -> dict[str, int]:
        held = super().live_bytes()
        held["features"] += self._graph.features_nbytes
        held["structure"] += self._graph.structure_nbytes + self._batches.nbytes
        return held

    def peak_elsewhere(self) -> int:
        """Return the peak bytes of samples, made by another thread or process."""
        return self._held

    def _subgraphs(self, epoch: int) -> Iterator[Subgraph]:
        """Yield the subgraphs of an epoch on this rank's device. Waiting for them counts as sampling."""
        self._steps[:] = [(epoch, step) for step in range(len(self._batches))]
        self._held = 0
        drawn = iter(self._workers) if self._workers else one_ahead(self._draw, self._steps)
        for _ in self._steps:
            with self._comm.clock("sample"):
                sub = next(drawn)
                if self._comm.device.type == "cpu":
                    self._held = max(self._held, 2 * sub.nbytes)
                sub = sub.to(self._comm.device)
            yield sub

    def _draw(self, at: At) -> Subgraph:
        sub = self._batches[at]
        return sub.pinned() if self._comm.device.type == "cuda" else sub

    def _mean_gradient(self, epoch: int, total: int) -> dict[str, Tensor]:
        """Return the mean gradient of the batches of an epoch at the current weights, weighted by size. Not counted.
        `total`: the sum of their sizes."""
        run = Pass(self._seed, epoch, training=True, probe=True)
        buckets = (self._differentiate_batch(sub, run, total) for sub in self._subgraphs(epoch))
        return self.gradients_of(self._comm.all_reduce(sum(buckets, torch.zeros((), device=self._comm.device))))

    def _differentiate_batch(self, sub: Subgraph, run: Pass, size: int) -> Tensor:
        """Return the gradients of this rank's share of the loss of a batch of this size, and the share, in one
        vector."""
        if not sub.ends[0]:
            return self.bucket_of(None)
        logits = self._logits(SampledGraph(sub, run, sum(self._hops)))
        loss = self._task.loss_sum(logits, self._graph.y[sub.node_ids[: sub.ends[0]]], sub.loss_weight)
        return self.bucket_of(loss / size)

    def _logits(self, g: SampledGraph) -> Tensor:
        """Return the logits of the seeds; each layer computes the rows that the next one reads."""
        activations = self._model.begin(g, self._graph.x.index_select(0, g.node_ids))
        for i, hops in enumerate(self._hops):
            activations = self._model.run_layer(i, g, activations)
            g = g.inner_view(hops)
            activations = tuple(first_rows(rows, g.num_rows) for rows in activations)
        return self._model.end(g, activations)


Drawn = TypeVar("Drawn")


def one_ahead(draw: Callable[[At], Drawn], steps: Sequence[At]) -> Iterator[Drawn]:
    """Yield the batch of every step in turn; a thread draws the next one meanwhile."""
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="gnnpar-draw") as thread:
        following = thread.submit(draw, steps[0])
        for at in steps[1:]:
            sub, following = following.result(), thread.submit(draw, at)
            yield sub
        yield following.result()


def _identity(item: Subgraph) -> Subgraph:
    return item
