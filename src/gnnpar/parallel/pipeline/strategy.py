"""GNNPipe: layers in stages, nodes in chunks: Y[c] = A[c, fresh] X[fresh] + A[c, stale] H[stale], stage after stage.

Chen, Chen and Qian, GNNPipe: Scaling Deep GNN Training with Pipelined Model Parallelism (arXiv 2308.10087). A chunk
never waits for another one: it reads this epoch's rows of the chunks before it and historical rows of the others. A
boundary carries N rows forward and N back, whatever the graph: 2 b N H (S - 1) bytes an epoch, twice that for GCNII.
Three techniques make it converge, at every number of stages: the order of the chunks is drawn anew each epoch
(`order`), the history is frozen for R epochs and zeros at first (`refresh`), gradients of stale edges are dropped and
gradients of fresh ones doubled (`gradient`). Evaluation is exact.

Deviations. A rank holds the rows and edges of its part, not of the graph. Messages are posted ahead and never wait for
a slot to end. Remedies: `gradient=mix`, `history_init=exact`, `refresh_exact`, `virtual`, `boundary`, `codec`, `remat`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from os.path import commonpath
from typing import Annotated, ClassVar, Literal

from annotated_types import Ge, Gt, Le
from torch import Tensor

from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.codecs.codec import CodecConfig, Exactness, Identity
from gnnpar.codecs.delta import refuse_delta
from gnnpar.comm import Mesh
from gnnpar.folds.edge_data import IN_BLOCKS
from gnnpar.folds.sum import Sum
from gnnpar.models.gnn import GNN
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.declared import Problem
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.needs import check_first_layer
from gnnpar.parallel.pipeline.chunk import Weights
from gnnpar.parallel.pipeline.cost import candidates, price_of
from gnnpar.parallel.pipeline.engine import PipelineEngine
from gnnpar.parallel.pipeline.placing import balanced, even
from gnnpar.parallel.pipeline.schedule import Schedule, fill_drain
from gnnpar.parallel.pipeline.simulate import expected
from gnnpar.parallel.pipeline.stage import Remat
from gnnpar.parallel.shape_trace import shape_trace
from gnnpar.parallel.strategy import Capabilities, CodedStrategy, LayerFacts, Workload, name_of
from gnnpar.parallel.torch_types import integers
from gnnpar.partition.chunking import Balanced, Metis, Range, chunk, chunk_statistics, quotient
from gnnpar.partition.shard import Shard, partition_statistics
from gnnpar.placement import Placement, Plan, Topology, array_hash
from gnnpar.pricing.candidate import Candidate, Scope
from gnnpar.pricing.machine import Machine
from gnnpar.pricing.price import Price

CHUNKS_PER_RANK = 4
_CHUNKERS = {"balanced": Balanced, "metis": Metis, "range": Range}


@dataclass(frozen=True, kw_only=True)
class GNNPipe(CodedStrategy):
    """`stages` x `parts` ranks; null: all that the world has. `virtual`: layer groups a stage has, interleaved.

    `chunks`: of all parts together; auto: 4 a rank; one: one a part, which is exact. `chunking`: balanced (METIS into
    four times as many with node weights 50 + degree, merged at random), metis or range. `order`: of chunks.
    `refresh`: epochs a history is kept. `history_init`: zeros, or one exact pass. `refresh_exact`: later ones too.
    `gradient`: double (fresh gradients count twice, stale ones nothing), fresh (once), mix (`mixing` = lambda).
    `cut`: of layers into stages, even in number or balanced in measured time. `boundary`: codec between stages.
    `codec`: of halo rows between the parts of a stage. `remat`: rows that a chunk keeps for its backward, all
    (none), the inputs of the stage (chunk) or of each layer (layer); the rest is computed again, to the same bits.
    """

    stages: Annotated[int, Ge(1), Le(4096)] | None = None
    parts: Annotated[int, Ge(1), Le(4096)] | None = 1
    virtual: Annotated[int, Ge(1), Le(10_000)] = 1
    chunks: Annotated[int, Ge(1)] | Literal["auto", "one"] = "auto"
    chunking: Literal["balanced", "metis", "range"] = "balanced"
    order: Literal["shuffled", "fixed"] = "shuffled"
    refresh: Annotated[int, Ge(1)] = 23
    history_init: Literal["zeros", "exact"] = "zeros"
    refresh_exact: bool = False
    gradient: Literal["double", "fresh", "mix"] = "double"
    mixing: Annotated[float, Gt(0.0), Le(1.0)] = 0.5
    cut: Literal["even", "balanced"] = "even"
    boundary: CodecConfig = Identity()
    remat: Remat = "none"
    limit = {"chunks": "one", "boundary": Identity()}

    hybrid: ClassVar[bool] = False
    """Candidates of a planner have several parts a stage."""

    def __post_init__(self) -> None:
        for codec in (self.boundary, self.codec):
            refuse_delta(codec, "gnnpipe or hybrid", "has stages that know only rows of their own chunks and layers")
        if isinstance(self.boundary, Adaptive):
            raise ValueError("boundary=adaptive needs traces of halo rows; use uniform, bf16 or identity")
        if isinstance(self.codec, Adaptive):
            raise ValueError(
                "codec=adaptive chooses bits by the links of all ranks and for all layers at once, but a stage knows "
                "only its own: use codec=uniform, random, bf16, drop or identity"
            )

    @property
    def exactness(self) -> frozenset[Exactness]:
        stale = frozenset[Exactness]() if self.chunks == "one" else frozenset[Exactness]({"stale"})
        lossy = (self.boundary.exactness | self.codec.exactness) - {"exact"}
        return (stale | lossy) or frozenset({"exact"})

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(
            chunks=True,
            edge_data=IN_BLOCKS,
            cached_first_layer=False,
            by_layers=True,
            replicated_weights=False,
            crosses_epochs=self.chunks != "one",
            learned_features=True,
        )

    def mesh(self, num_ranks: int) -> Mesh:
        stages, parts = self.stages, self.parts
        if stages is None:
            dividing = (p for p in range(2, num_ranks + 1) if num_ranks % p == 0)
            parts = parts or next(dividing, 1)
            stages = max(1, num_ranks // parts)
        return Mesh.grid(num_ranks, stages=stages, parts=parts)

    def chunks_per_part(self, num_ranks: int) -> int:
        """Return the number of chunks of each part. ValueError if it does not fit the parts or the stages."""
        mesh = self.mesh(num_ranks)
        stages, parts = len(mesh.ranks), len(mesh.ranks[0])
        if self.chunks == "one":
            return 1
        chunks = CHUNKS_PER_RANK * num_ranks if self.chunks == "auto" else self.chunks
        if chunks % parts:
            raise ValueError(
                f"strategy.chunks={chunks} does not divide by strategy.parts={parts}: "
                f"use {-(-chunks // parts) * parts} chunks."
            )
        if chunks // parts < stages:
            raise ValueError(
                f"strategy.chunks={chunks} gives each of {parts} parts {chunks // parts} chunks, fewer than its "
                f"{stages} stages: use at least {stages * parts} chunks, or chunks=one, where all stages but one wait."
            )
        return chunks // parts

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        self._check_mesh(num_ranks, num_layers)
        super().check(num_ranks, num_layers, epochs)

    def _check_mesh(self, num_ranks: int, num_layers: int) -> None:
        """Raise ValueError if layers, stages, parts and codecs do not fit."""
        stages = len(self.mesh(num_ranks).ranks)
        if stages * self.virtual > num_layers:
            groups = f"{stages} stages" + (f" x {self.virtual} virtual ones" if self.virtual > 1 else "")
            raise ValueError(
                f"{num_layers} layers cannot fill {groups}: use model.num_layers={stages * self.virtual} or more, "
                f"or at most {num_layers} stages (strategy=hybrid with strategy.stages)."
            )
        self.chunks_per_part(num_ranks)
        if len(self.mesh(num_ranks).ranks[0]) == 1 and self.codec.exactness - {"exact"}:
            raise ValueError(
                f"codec={type(self.codec).__name__.lower()} is for rows between the parts of a stage, but "
                "strategy.parts=1: use two parts or more (strategy=hybrid), codec=identity, or codec@strategy.boundary "
                "for rows between stages."
            )

    def candidates(self, scope: Scope, ranks: int) -> Iterable[Candidate]:
        return candidates(scope, ranks, hybrid=self.hybrid)

    def cost(self, problem: Problem, machine: Machine) -> Price:
        return price_of(self, problem, machine)

    def cut_into(
        self, stages: int, num_layers: int, seconds: Callable[[], Sequence[float]] | None
    ) -> tuple[range, ...]:
        """Return the layers of each virtual stage. `seconds`: of each layer; None: they are not measured."""
        if self.cut == "even":
            return even(num_layers, stages)
        if seconds is None:
            raise ValueError("strategy.cut=balanced needs measured layers, which only a run has: use cut=even.")
        return balanced(seconds(), stages)

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        self._check_mesh(topology.num_ranks, workload.num_layers)
        mesh, per_part = self.mesh(topology.num_ranks), self.chunks_per_part(topology.num_ranks)
        parts, stages = len(mesh.ranks[0]), len(mesh.ranks) * self.virtual
        data, part_of = workload.dataset, workload.part_of(parts)
        by = _CHUNKERS[self.chunking]()
        chunk_of = chunk(data, part_of, per_part, by=by, cache=workload.cache, say=workload.say)
        layers_of = self.cut_into(stages, workload.num_layers, workload.layer_seconds)
        edges = [integers(row) for row in quotient(data.edge_index, chunk_of, per_part).unbind()]
        statistics = partition_statistics(data, part_of, parts) | chunk_statistics(data.edge_index, part_of, chunk_of)
        statistics |= {"gradient_coverage": expected(self.schedule(1, per_part), edges).kept}
        hashes = {"graph": data.graph_hash, "split": data.split_hash}
        hashes |= {"partition": array_hash(part_of), "chunks": array_hash(chunk_of)}
        return Plan(Placement(mesh.ranks, part_of, chunk_of, layers_of), hashes=hashes, statistics=statistics)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        how = f"chunks, boundary {name_of(self.boundary)}"
        if plan.num_parts > 1:
            how += f", halo {name_of(self.codec)}"
        return (LayerFacts(mode="chunk", how=how),) * plan.num_layers

    def schedule(self, stages: int, slots: int, *, virtual: int = 1) -> Schedule:
        """Return forwards and backwards of every rank. Override it for your own schedule
        (docs/tutorials/own_schedule.md)."""
        return fill_drain(stages, slots, virtual=virtual)

    def build(self, context: BuildContext) -> Engine:
        check_first_layer(self, context.first_layer)
        self._check_folds(context.model, context.shard)
        return PipelineEngine(context, self, stages_of(context.model, context.plan.placement.layers_of))

    @property
    def weights(self) -> Weights:
        if self.gradient == "mix":
            return Weights(2.0 - self.mixing, self.mixing)
        return Weights(2.0 if self.gradient == "double" else 1.0, 0.0)

    def _check_folds(self, model: GNN, shard: Shard) -> None:
        if self.gradient != "mix":
            return
        for use in shape_trace(model, replace(shard, x=shard.x.new_zeros(1, model.in_dim), learned=None)):
            if not isinstance(use.agg, Sum):
                raise ValueError(
                    f"strategy.gradient=mix needs sums, but layer {use.layer} folds by {type(use.agg).__name__}: "
                    "use gradient=double, or a model that sums (gcn, sage, gcnii, resgcn, gin)."
                )


def stages_of(model: GNN, layers_of: tuple[range, ...]) -> dict[str, int]:
    """Return the virtual stage of each weight of the model, by name: of the encoder the first, of the decoder the last,
    of a buffer that of the parameter with the most similar name. ValueError if two stages share a parameter."""

    def stage(layer: int | None) -> int:
        at = model.num_layers - 1 if layer is None else layer
        return next(s for s, layers in enumerate(layers_of) if at in layers)

    names, stage_of = dict[Tensor, list[str]](), dict[str, int]()
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    for shared in names.values():
        layers = {model.layer_of(name) for name in shared}
        layers -= {None} if model.config.wraps and len(layers) > 1 else set()  # one name of a PyG model tells it
        if len(stages := set(map(stage, layers))) > 1:
            raise ValueError(
                f"{' and '.join(shared)} are one parameter, and two stages of a pipeline would train it apart; choose "
                "single, graph_parallel or another strategy without stages"
            )
        stage_of |= dict.fromkeys(shared, stages.pop())
    for name in model.weights.keys() - stage_of.keys():
        layer = model.layer_of(name)
        like = max(stage_of, key=lambda each: len(commonpath([each.replace(".", "/"), name.replace(".", "/")])))
        stage_of[name] = stage_of[like] if layer is None and model.config.wraps else stage(layer)
    return stage_of
