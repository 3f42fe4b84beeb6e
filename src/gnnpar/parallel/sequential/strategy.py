"""Sequential aggregation and rematerialization: Y[N_P, F] = sum_r A[N_P, N_r] X[N_r, F] over rounds r, exact.

Source: Mostafa, MLSys 2022 (arXiv 2111.06483). A rank folds its own block, then the rows of one round of peers after
the other, and drops them: (2 + prefetch)/N of the features are alive on a rank, whatever the cut. Backward:
linear folds send gradients back and need no row twice: 2C bytes an aggregation, C one halo exchange. Others get the
rows of each round again: 3C. Attention with additive scores (GAT) pushes instead: (dO, a_dst, logsumexp, <dO, O>) of
destinations go to the owners of their sources, who hold all else. That is F + 3H numbers for each pair of a
destination and a peer with an edge to it, less than the 2 (F + H) a halo row of the last two thirds of 3C, and no
gradient of a remote row ever exists.

Deviations: push mode is ours, backward=pull is the paper. Rounds are sized by rows (`rounds`), not by parts. Messages
go point to point, never as collectives. A fold's gradient is its own rule, not autograd per block. Ties of a maximum
go to one winner.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, Gt, Le
from torch import Tensor

from gnnpar.codecs.codec import FirstAndRest, Identity, is_constant
from gnnpar.comm import CodedExchange
from gnnpar.comm.rows import row_nbytes
from gnnpar.folds.edge_data import ALL_KINDS, IN_BLOCKS
from gnnpar.parallel.blocks import HeldRows
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Declaration, Problem, Proposes
from gnnpar.parallel.edges import EdgeOrder
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.row_bytes import RowBytes
from gnnpar.parallel.sequential.out_of_core import OutOfCoreEngine
from gnnpar.parallel.sequential.rounds import Cuts, Pushes, RoundSchedule, Sizing
from gnnpar.parallel.sequential.view import Residency, SequentialGraph
from gnnpar.parallel.shape_trace import shape_trace
from gnnpar.parallel.strategy import Capabilities, CodedStrategy, LayerFacts, Workload, name_of
from gnnpar.parallel.torch_types import unique
from gnnpar.partition.shard import split
from gnnpar.placement import Plan, Topology
from gnnpar.pricing.candidate import Knobs, Scope, Values
from gnnpar.pricing.ir import ModelIR
from gnnpar.pricing.price import Traffic
from gnnpar.pricing.steps import Step
from gnnpar.pricing.work import Work
from gnnpar.track.text import counted

EVERY_ROUND = 1 << 30  # of messages that wait on the host: a part then waits once an exchange


@dataclass(frozen=True, kw_only=True)
class SAR(CodedStrategy, Proposes):
    """`rounds`: remote rows at once: part (as many as the largest part owns), peer (the paper), one (one-shot), MiB.

    `prefetch`: rounds in flight ahead of the fold. `backward`: push where the fold can, or pull everywhere. `remat`:
    pulled rows that backward reads are fetched again, not kept.
    `codec`: halo rows and their gradients on the wire, in training; evaluation is exact, and sequential too.
    `logical_parts`: out of core, so many parts on one device, one at a time; all else lies on the host (a GPU's: its
    memory, a CPU's: a file in `host_dir`, the system's folder for temporary files if null). Messages wait there too, so
    `prefetch` has no meaning.
    first_layer=cached keeps results of linear folds of the features; it never keeps features of halo nodes.
    """

    rounds: Sizing = "part"
    prefetch: Annotated[int, Ge(0)] = 1
    remat: bool = True
    backward: Literal["push", "pull"] = "push"
    logical_parts: Annotated[int, Gt(1), Le(4096)] | None = None
    host_dir: Path | None = None

    @property
    def capabilities(self) -> Capabilities:
        out_of_core = self.logical_parts is not None
        return Capabilities(
            max_ranks=1 if out_of_core else None,
            from_shards=not out_of_core,
            chunks=out_of_core,
            edge_data=IN_BLOCKS if out_of_core else ALL_KINDS,
            no_pyg=f"with strategy.logical_parts={self.logical_parts} lets parts take turns within a module"
            if out_of_core
            else "",
            whole_neighborhoods=False,
            moments=not out_of_core,
            less_memory=self._less_memory,
            pair_loss=not out_of_core,
            captured=not out_of_core and is_constant(self.codec),
            learned_features=not out_of_core,
        )

    def _less_memory(self, num_ranks: int) -> str:
        if (parts := self.logical_parts) is not None:
            return f"set strategy.logical_parts={2 * parts}: the device holds one part of {2 * parts} at a time"
        if num_ranks > 1 and (self.prefetch > 0 or self.rounds == "one"):
            return "set strategy.prefetch=0 strategy.rounds=peer, or strategy.logical_parts=8 world_size=1: out of core"
        return f"set strategy.logical_parts={4 * num_ranks} world_size=1: out of core, one part on the device at a time"

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        super().check(num_ranks, num_layers, epochs)
        if self.logical_parts is not None and num_ranks != 1:
            raise ValueError(
                f"strategy.logical_parts={self.logical_parts} puts all parts on one device, but there are "
                f"{counted(num_ranks, 'rank')}: set world_size=1, or strategy.logical_parts=null."
            )

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology, chunks=self.logical_parts)

    def declared(self) -> Declaration:
        """Declare the halo in rounds, `prefetch` of them ahead of the fold. Its time knows no codec."""
        return Declaration(
            family="sar",
            step=Step("rounds", prefetch=self.prefetch, again=self.backward if self.remat else None),
            words=[f"prefetch {self.prefetch}", self.backward] + ["kept"] * (not self.remat),
            options={"prefetch": self.prefetch, "backward": self.backward, "remat": self.remat},
            notes=() if self.rounds == "part" else (f"rounds={self.rounds} is priced as rounds=part",),
            coded=False,
            sent=self._sent,
            unpriced="no price is known of what goes out of core (logical_parts)" if self.logical_parts else "",
        )

    def _sent(self, traffic: Traffic, work: Work, rows: RowBytes, problem: Problem) -> Traffic:
        """Return the bytes of all rounds: backward sends gradients; rows that a gradient reads come again (remat), or
        rows of destinations go the other way (push)."""
        pushes, run = self.backward == "push", problem.workload
        pushed = pushed_rows(run.dataset.edge_index, run.part_of(problem.ranks), problem.ranks) if pushes else 0
        copies, remat_bytes, push_bytes, back = work.parts.copies, 0.0, 0.0, 0.0
        for fold in work.exchanged_folds:
            if pushes and fold.pushed:
                sum_bytes = (rows.summed if rows.sends else 0) * (fold.pushed - fold.src[0])
                push_bytes += pushed * (rows.row(fold.src[:1], gradient=True) + sum_bytes)
                continue
            back += copies * rows.row(fold.src, gradient=True) * fold.learned
            if fold.needs_src and not fold.linear and self.remat:
                remat_bytes += copies * rows.row(fold.src)
        return replace(traffic, backward=back, remat=remat_bytes, push=push_bytes)

    def knobs(self, ir: ModelIR) -> Knobs:
        folds = [f for g in ir.groups for f in g.folds]
        return {
            "prefetch": (1, 0, 2),
            "backward": ("push", "pull") if any(f.pushed for f in folds) else ("push",),
            "remat": (True, False) if any(f.needs_src for f in folds) else (True,),
        }

    def proposals(self, scope: Scope, ranks: int) -> Iterable[Values]:
        """Return the values of each knob, with the defaults of the others."""
        usual = {name: values[0] for name, values in self.knobs(scope.ir).items()}
        others = [usual | {name: v} for name, values in self.knobs(scope.ir).items() for v in values[1:]]
        return [usual, *others] if ranks > 1 else []

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return (LayerFacts(mode="sar", how=f"{name_of(self.codec)}, overlap edges"),) * plan.num_layers

    def build(self, context: BuildContext) -> Engine:
        shard, chunk_of = context.shard, context.plan.placement.chunk_of
        if chunk_of is None:
            return self._engine(context)
        parts = split(shard, chunk_of.to(shard.node_ids.device), int(chunk_of.max()) + 1)
        return OutOfCoreEngine(
            build=lambda part, rank: replace(self, prefetch=EVERY_ROUND)._engine(
                replace(context, shard=part, comm=rank)
            ),
            shard=shard,
            parts=parts,
            comm=context.comm,
            host_dir=self.host_dir or Path(tempfile.gettempdir()),
        )

    def _engine(self, context: BuildContext) -> FlatEngine:
        """Of one part."""
        context = context.normalised_for(self.exactness)
        shard, comm = context.shard, context.comm
        schedule = RoundSchedule.agree(self.rounds, shard, comm)
        uses = shape_trace(context.model, shard)
        pushed = [use.pushed for use in uses if use.pushed and self.backward == "push"]
        for like in [*(use.src for use in uses), *pushed]:
            schedule.limit(row_nbytes(like))
        pushes = Pushes.exchange(shard, schedule, comm) if pushed else None
        codec, exact_codec = (c.build(shard.row_lists, comm, context.seed) for c in (self.codec, Identity()))
        cache = context.new_cache()
        # state of a lossy codec must not leak into evaluation
        exact_cache = cache if "exact" in self.exactness else context.new_cache()
        # statistics that are rounded would make weights of another softmax; a codec that drops rows drops them too
        statistics = codec if "sampled" in self.exactness else exact_codec
        cuts = Cuts(shard.halo)
        view = SequentialGraph(
            shard,
            context.start,
            exchange=CodedExchange(comm, codec),
            edges=EdgeOrder(shard, "edges"),
            cache=cache,
            schedule=schedule,
            cuts=cuts,
            prefetch=self.prefetch,
            remat=self.remat,
            pushes=pushes,
            push_exchange=CodedExchange(comm, FirstAndRest(codec, statistics)),
        )
        exact = replace(
            view,
            exchange=CodedExchange(comm, exact_codec),
            push_exchange=CodedExchange(comm, FirstAndRest(exact_codec, exact_codec)),
            cache=exact_cache,
            held=HeldRows(),
            residency=Residency(),
        )
        return FlatEngine(
            context,
            view=view,
            exact=exact,
            codecs=(codec,),
            structure=(cuts, pushes) if pushes else (cuts,),
            parts={"held": view.held, "residency": view.residency, "cache": cache},
        )


def pushed_rows(edge_index: Tensor, part_of: Tensor, parts: int) -> int:
    """Return the number of pairs of a destination and another part with an edge to it: the rows that push mode sends.

    Shapes: edge_index [2, E], part_of [N].
    """
    src, dst = edge_index
    crossing = part_of[src] != part_of[dst]
    return len(unique(dst[crossing] * parts + part_of[src[crossing]])[0])
