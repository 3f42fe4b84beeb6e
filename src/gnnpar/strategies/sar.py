"""Sequential aggregation and rematerialization: Y[N_P, F] = sum_r A[N_P, N_r] X[N_r, F] over rounds r, exact.

Source: Mostafa, MLSys 2022 (arXiv 2111.06483). A rank folds its own block, then the rows of one round of peers after
the other, and lets go of them: (2 + prefetch)/N of the features are alive on a rank, whatever the cut. Backward:
linear folds send gradients back and need no row twice (2C bytes an aggregation, C one halo exchange); others get the
rows of each round again (3C).

Deviations: rounds are sized by rows (`rounds`), not by parts; messages go point to point, never as collectives; a
fold's gradient is its own rule, not autograd per block; ties of a maximum go to one winner.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

from annotated_types import Ge

from gnnpar.codecs.codec import CodecConfig, Exactness, Identity
from gnnpar.comm import Communicator
from gnnpar.data.tasks import Task
from gnnpar.engines.engine import Engine
from gnnpar.engines.flat import FlatEngine
from gnnpar.models.gnn import GNN
from gnnpar.plan import LayerPolicy, Plan, Topology
from gnnpar.shard.shard import Shard
from gnnpar.strategies.strategy import FirstLayer, Workload
from gnnpar.views.halo import Walk
from gnnpar.views.local import Pass
from gnnpar.views.rounds import Schedule, Sizing
from gnnpar.views.sequential import Cuts, SequentialGraph
from gnnpar.views.sketch import sketch


@dataclass(frozen=True, kw_only=True)
class SAR:
    """`rounds`: remote rows at once: part (as many as the largest part owns), peer (the paper), one (one-shot), MiB.

    `prefetch`: rounds in flight ahead of the fold. `remat`: rows that backward reads are fetched again, not kept.
    `codec`: halo rows and their gradients on the wire, in training; evaluation is exact, and sequential too.
    first_layer=cached keeps results of linear folds of the features; it never keeps features of halo nodes.
    """

    rounds: Sizing = "part"
    prefetch: Annotated[int, Ge(0)] = 1
    remat: bool = True
    codec: CodecConfig = Identity()
    max_ranks = None

    @property
    def exactness(self) -> frozenset[Exactness]:
        return self.codec.exactness

    def exact_limit(self) -> SAR:
        return replace(self, codec=Identity())

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        policy = LayerPolicy(
            mode="sar", codec=self.codec, remat=self.remat, rounds=self.rounds, prefetch=self.prefetch
        )  # fmt: skip
        return workload.flat_plan(topology, policy)

    def build(
        self, plan: Plan, shard: Shard, model: GNN, task: Task, comm: Communicator,
        *, seed: int, first_layer: FirstLayer = "live",
    ) -> Engine:  # fmt: skip
        schedule = Schedule.agree(self.rounds, shard, comm)
        for use in sketch(model, shard):
            schedule.limit(sum(each.nbytes(1) for each in use.src))
        codec, exact_codec = (c.build(shard, comm, seed) for c in (self.codec, Identity()))
        cache: dict | None = {} if first_layer == "cached" else None
        # what a lossy codec kept must not leak into evaluation
        exact_cache = cache if cache is None or "exact" in self.exactness else {}
        cuts = Cuts(shard.halo)
        view = SequentialGraph(
            shard, Pass(seed), comm=comm, codec=codec, walk=Walk(shard, "edges"), cache=cache, schedule=schedule,
            cuts=cuts, prefetch=self.prefetch, remat=self.remat,
        )  # fmt: skip
        exact = replace(view, codec=exact_codec, cache=exact_cache, held={})
        return FlatEngine(
            view=view, exact=exact, shard=shard, model=model, task=task, comm=comm, seed=seed,
            codecs=(codec,), held=view.held, cache=cache, structure=(cuts,),
        )  # fmt: skip
