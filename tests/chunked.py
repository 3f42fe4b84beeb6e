"""GNNPipe written once more for tests: by plain autograd over the whole graph."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from gnnpar.data.tasks import make_task
from gnnpar.folds.block import Block
from gnnpar.folds.sum import Sum
from gnnpar.graph import InEdges
from gnnpar.parallel.blocks import fold_block
from gnnpar.parallel.local import LocalRows, Pass, by_type
from gnnpar.parallel.pipeline.chunks import draw_order
from gnnpar.verify.conformance import Job


@dataclass
class _Memory:
    """What lives from epoch to epoch, by (layer, call)."""

    snapshot: dict = field(default_factory=dict)
    fresh: dict = field(default_factory=dict)  # this epoch's source rows, with their graphs, by slot
    last_out: dict = field(
        default_factory=dict
    )  # results of aggregations, whose gradient is the next epoch's stale one
    out: dict = field(default_factory=dict)


class _Slot:
    """The Graph of all nodes whose turn is in one slot; columns of other nodes are fresh or constants."""

    normalised = False

    def __init__(self, study: ByAutograd, slot_of: Tensor, slot: int, run: Pass, layer: int = 0) -> None:
        self.study, self.slot_of, self.slot, self.run, self.layer, self.calls = study, slot_of, slot, run, layer, 0
        self.rows = (slot_of == slot).nonzero().flatten()
        degree = study.dataset.in_degree[self.rows].double()
        self.local = LocalRows(self.rows, degree, run=run, layer=layer)
        self.node_ids, self.in_degree = self.rows, degree
        weight = study.dataset.in_weight
        self.in_weight = None if weight is None else weight[self.rows]
        self.dropout, self.edge_dropout = self.local.dropout, self.local.edge_dropout

    def type_degree(self, types: int) -> Tensor:
        kinds, dst = self.study.dataset.edges.type, self.study.dataset.edge_index[1]
        if kinds is None:
            return by_type(None, self.in_degree, types)
        ones = torch.nn.functional.one_hot(kinds, types).double()
        return torch.zeros(self.study.dataset.num_nodes, types).double().index_add_(0, dst, ones)[self.rows]

    @property
    def in_edges(self) -> InEdges:
        data = self.study.dataset
        where = torch.full((data.num_nodes,), -1)
        where[self.rows] = torch.arange(len(self.rows))
        edges = (where[data.edge_index[1]] >= 0).nonzero().flatten()
        carried = data.edges.at(edges).to(edges.device, torch.float64)
        return InEdges(where[data.edge_index[0, edges]], where[data.edge_index[1, edges]], carried.weight, carried.type)

    @property
    def edge_ids(self) -> Tensor:
        return (torch.isin(self.study.dataset.edge_index[1], self.rows)).nonzero().flatten()

    def at(self, layer: int) -> _Slot:
        return _Slot(self.study, self.slot_of, self.slot, self.run, layer)

    def source(self, message: Any, *rows: Tensor) -> Any:
        return message(self, *rows)

    def destinations(self, *rows: Tensor) -> Any:
        return self, rows

    def aggregate(self, agg: Any, src: Any, dst: Any = (), edge: Any = (), shared: Any = ()) -> Tensor:
        memory, data = self.study.memory, self.study.dataset
        call = self.layer, self.calls
        self.calls += 1
        memory.fresh.setdefault(call, {})[self.slot] = src
        where = torch.full((data.num_nodes,), -1)
        where[self.rows] = torch.arange(len(self.rows))
        edges = (where[data.edge_index[1]] >= 0).nonzero().flatten()
        ends = data.edge_index[:, edges]
        block = Block.from_edges(
            where[ends[1]],
            ends[0],
            num_dst=len(self.rows),
            num_src=data.num_nodes,
            src_ids=torch.arange(data.num_nodes),
            edges=replace(data.edges.at(edges).to(edges.device, torch.float64), ids=edges),
        )
        tables = tuple(self._mixed(call, i, x) for i, x in enumerate(src))
        if self.study.stale and isinstance(agg, Sum) and src[0].requires_grad:
            self._add_last_gradients(call, src[0], types=bool(agg.types))
        out = fold_block(agg, block, tables, dst, edge, shared)
        if out.requires_grad:
            out.retain_grad()
        if not agg.whole_neighborhood:  # one row a node
            memory.out.setdefault(call, {})[self.slot] = self.rows, out
        return out

    def _mixed(self, call: Any, i: int, like: Tensor) -> Tensor:
        """Column by column: own slot as it is, slots before with the weighted gradient, the rest from the snapshot."""
        old = self.study.memory.snapshot.get(call)
        n = self.study.dataset.num_nodes
        table = like.new_zeros(n, *like.shape[1:]) if old is None else old[i].clone()
        weight = self.study.fresh
        for slot, rows in self.study.memory.fresh[call].items():
            x = rows[i]
            if slot != self.slot and x.is_floating_point():
                x = weight * x - ((weight - 1) * x).detach()
            table = table.index_put(((self.slot_of == slot).nonzero().flatten(),), x)
        return table

    def _add_last_gradients(self, call: Any, x: Tensor, *, types: bool) -> None:
        """stale x A^T G of last epoch, over edges to destinations in earlier slots."""
        last = self.study.memory.last_out.get(call)
        if last is None:
            return
        src, dst = self.study.dataset.edge_index
        keep = (self.slot_of[src] == self.slot) & (self.slot_of[dst] < self.slot)
        rows, weight, kinds = last[dst[keep]], self.study.dataset.edges.weight, self.study.dataset.edges.type
        if types:
            rows = rows[:, 0] if kinds is None else rows[torch.arange(len(rows)), kinds[keep]]
        rows = rows if weight is None else rows * weight[keep].double()[:, None]
        total = x.new_zeros(len(self.slot_of), *x.shape[1:]).index_add_(0, src[keep], rows)
        x.register_hook(lambda g: g + self.study.stale * total[self.rows])


class ByAutograd:
    """The same training as a job's, on one process, every epoch one autograd graph. `fresh`, `stale`: the weights."""

    def __init__(self, job: Job, *, refresh: int, fresh: float, stale: float = 0.0, shuffled: bool = True) -> None:
        self.job, self.dataset, self.refresh, self.fresh, self.stale = job, job.dataset, refresh, fresh, stale
        self.shuffled, self.memory = shuffled, _Memory()

    def slots(self, epoch: int) -> Tensor:
        """The slot of every node."""
        placement = self.job.plan.placement
        assert placement.chunk_of is not None
        num = int(placement.chunk_of.max()) + 1
        order = draw_order(num, seed=self.job.seed, epoch=epoch, shuffled=self.shuffled)
        slot = torch.empty(num, dtype=torch.int64)
        slot[list(order)] = torch.arange(num)
        return slot[placement.chunk_of]

    def train(self) -> tuple[list[float], list[dict[str, Tensor]]]:
        """(losses, gradients) of every epoch."""
        job, data, memory = self.job, self.dataset, self.memory
        model, task = copy.deepcopy(job.model).double(), make_task(data.task, data.num_classes)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses, gradients = [], []
        for epoch in range(job.epochs):
            optimizer.zero_grad()
            slot_of, loss = self.slots(epoch), torch.zeros((), dtype=torch.float64)
            memory.fresh, memory.out = {}, {}
            for slot in range(int(slot_of.max()) + 1):
                g: Any = _Slot(self, slot_of, slot, Pass(job.seed, epoch, training=True))
                logits = model(g, data.x[g.rows].double())
                train = data.train_mask[g.rows]
                loss = loss + task.loss_sum(logits[train], data.y[g.rows][train]) / int(data.train_mask.sum())
            loss.backward()
            losses.append(loss.item())
            gradients.append(
                {n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            )
            optimizer.step()
            self._remember(epoch, slot_of)
        return losses, gradients

    def _remember(self, epoch: int, slot_of: Tensor) -> None:
        memory, n = self.memory, self.dataset.num_nodes
        if (epoch + 1) % self.refresh == 0:
            for call, by_slot in memory.fresh.items():
                memory.snapshot[call] = tuple(
                    torch.zeros(n, *x.shape[1:], dtype=x.dtype) for x in next(iter(by_slot.values()))
                )
                for slot, rows in by_slot.items():
                    for table, x in zip(memory.snapshot[call], rows, strict=True):
                        table[slot_of == slot] = x.detach()
        for call, by_slot in memory.out.items():
            some = next(iter(by_slot.values()))[1]
            memory.last_out[call] = torch.zeros(n, *some.shape[1:], dtype=some.dtype)
            for rows, out in by_slot.values():
                if out.grad is not None:
                    memory.last_out[call][rows] = out.grad
