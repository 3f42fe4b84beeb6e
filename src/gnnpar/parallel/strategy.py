"""The Strategy protocol: a configuration that states its capabilities, plans on rank 0 and builds an engine.

`FlatStrategy` and `CodedStrategy` have the defaults of strategies with one part per rank and all layers on every rank.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, Protocol, Self, runtime_checkable

import torch
from torch import Tensor

from gnnpar.codecs.codec import CodecConfig, Exactness, Identity, check_epochs
from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import ALL_KINDS, EdgeKind
from gnnpar.models.gnn import GNN
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.view import FirstLayer
from gnnpar.partition.manifest import Manifest
from gnnpar.partition.partition import Partitioner, partition, partition_edges
from gnnpar.partition.shard import partition_statistics
from gnnpar.partition.vertex_cut import vertex_cut_statistics
from gnnpar.placement import Placement, Plan, Topology, array_hash

if TYPE_CHECKING:
    from gnnpar.pricing.machine import Machine


@dataclass(frozen=True, eq=False)
class Workload:
    """The run, on rank 0. `cache`: folder of finished partitions, or None.

    For a strategy that plans: the model, and the machine with the needs of its devices (None: nominal figures).
    `layer_seconds()`: measured time of each layer. `shards`: a graph cut on disk beforehand; the dataset then has no
    rows, and only `flat_plan` can be used.
    """

    dataset: Dataset
    partition: Partitioner
    num_layers: int
    cache: Path | None = None
    say: Callable[[str], None] = lambda _: None
    model: GNN | None = None
    setting: Callable[[], Machine] | None = None
    first_layer: FirstLayer = "live"
    layer_seconds: Callable[[], Sequence[float]] | None = None
    shards: Manifest | None = None

    def part_of(self, parts: int) -> Tensor:
        return partition(self.dataset, parts, by=self.partition, cache=self.cache, say=self.say)

    def with_vertex_cut(self, plan: Plan) -> Plan:
        """Return the plan with a part for every edge in addition to the parts of nodes."""
        edges, parts = self.dataset.edge_index, plan.num_parts
        edge_part_of = partition_edges(
            self.dataset, parts, plan.part_of, by=self.partition, cache=self.cache, say=self.say
        )
        return replace(
            plan,
            placement=replace(plan.placement, edge_part_of=edge_part_of),
            hashes={**plan.hashes, "edges": array_hash(edge_part_of)},
            statistics={**plan.statistics, **vertex_cut_statistics(edges, plan.part_of, edge_part_of, parts)},
        )

    def flat_plan(self, topology: Topology, *, chunks: int | None = None) -> Plan:
        """Return a plan with one part per rank and all layers on every rank. `chunks`: that many parts on one rank, in
        turn."""
        if (shards := self.shards) is not None:  # a partition known only by its hash
            cut = Placement((tuple(range(shards.parts)),), torch.zeros(0).long(), None, (range(self.num_layers),))
            return Plan(cut, hashes=shards.hashes, statistics=shards.statistics)
        ranks, parts = topology.num_ranks, chunks or topology.num_ranks
        part_of = self.part_of(parts)
        whole = torch.zeros_like(part_of)
        nodes = (part_of, None) if chunks is None else (whole, part_of)
        placement = Placement((tuple(range(ranks)),), *nodes, (range(self.num_layers),))
        return Plan(
            placement,
            hashes={
                "graph": self.dataset.graph_hash,
                "split": self.dataset.split_hash,
                "partition": array_hash(part_of),
            },
            statistics=partition_statistics(self.dataset, part_of, parts),
        )


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Capabilities of a strategy as configured.

    `max_ranks`: the most ranks it can use; None: any number. `from_shards`: it runs from shards on disk (its plan is
    `flat_plan` with one part per rank). `vertex_cut`: edges have their own parts. `chunks`: the nodes of a rank may be
    cut into chunks that run in turn. `cached_first_layer`: it supports first_layer=cached. `by_layers`: it runs layer
    by layer, so it needs a model that is cut into layers. `no_pyg`: why it runs no PyG model, to be read after its
    name. `edge_data`: kinds of edge data it supports. `whole_neighborhoods`: a fold may read all in-edges of a row at
    once. `moments`: its ranks together hold all rows of a layer at once, so that a model may read their mean and
    variance. `replicated_weights`: every rank holds all parameters (one stage). `crosses_epochs`: rows of one epoch are
    read in a later one. `plans_again`: it plans again after the warm-up, with measurements. `less_memory`: number of
    ranks -> the settings of this strategy that need less memory. `pair_loss`: a rank has the output rows of all its
    nodes at once, as losses of node pairs need. `clusters`: the number of non-empty clusters that it cuts the graph
    into. `row_order`: the rows of a part may stand in any order. `captured`: device work differs between epochs only in
    keys and numbers held in tensors, so a CUDA graph may hold an epoch (`FlatEngine.launch_epoch`). `learned_features`:
    a rank reads other nodes' features only through the folds of layers, which return gradients.
    """

    max_ranks: int | None = None
    from_shards: bool = False
    vertex_cut: bool = False
    chunks: bool = False
    cached_first_layer: bool = True
    by_layers: bool = False
    no_pyg: str = ""
    edge_data: frozenset[EdgeKind] = frozenset()
    whole_neighborhoods: bool = True
    moments: bool = False
    replicated_weights: bool = True
    crosses_epochs: bool = False
    plans_again: bool = False
    less_memory: Callable[[int], str] | None = None
    clusters: int = 1
    pair_loss: bool = False
    row_order: bool = False
    captured: bool = False
    learned_features: bool = False


@dataclass(frozen=True, kw_only=True)
class LayerFacts:
    """Facts of a layer's aggregation for display. `mode`: one word. `how`: its messages and their timing, if any."""

    mode: str
    how: str = ""


class Strategy(Protocol):
    """A strategy: implemented by frozen, keyword-only dataclasses with the YAML keys as fields."""

    @property
    def exactness(self) -> frozenset[Exactness]: ...
    @property
    def capabilities(self) -> Capabilities: ...
    def exact_limit(self) -> Strategy:
        """Return the configuration that must equal the single device, for example with the identity codec or one
        chunk."""
        ...

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        """Raise ValueError, before any rank starts, for a configuration that cannot run."""
        ...

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        """Return the plan. Pure; called on rank 0 and then broadcast."""
        ...

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        """Return the facts of each layer under this plan."""
        ...

    def build(self, context: BuildContext) -> Engine: ...


@runtime_checkable
class Cites(Protocol):
    """A strategy with papers that depend on its settings; others are cited by the arXiv numbers of their docstrings."""

    @property
    def papers(self) -> tuple[str, ...]:
        """Return arXiv numbers."""
        ...


def name_of(codec: CodecConfig) -> str:
    """Return the displayed name of a codec: bfloat16."""
    return type(codec).__name__.lower()


def check_plan(strategy: Strategy, plan: Plan) -> None:
    """Raise ValueError for a plan, perhaps written by hand, that its strategy cannot run."""
    for problem in _plan_problems(strategy, plan):
        raise ValueError(f"the plan cannot run: {problem}")


def _plan_problems(strategy: Strategy, plan: Plan) -> Iterator[str]:
    can, name = strategy.capabilities, plan.strategy.get("name") or type(strategy).__name__
    if can.max_ranks is not None and plan.num_ranks > can.max_ranks:
        yield f"strategy={name} runs on {can.max_ranks} rank, but mesh has {plan.num_ranks}"
    for field_name, stages in (("mesh", plan.placement.mesh), ("layers_of", plan.placement.layers_of)):
        if can.replicated_weights and len(stages) > 1:
            yield f"strategy={name} has one stage, but {field_name} has {len(stages)}"
    if not can.chunks and plan.placement.chunk_of is not None:
        yield f"strategy={name} has no chunks, but arrays has chunk_of"
    if can.vertex_cut != (plan.placement.edge_part_of is not None):
        yield f"strategy={name} {'needs a' if can.vertex_cut else 'has no'} vertex cut (arrays.edge_part_of)"
    if plan.quality is not None and (beyond := sorted(strategy.exactness - {"exact"} - set(plan.quality))):
        yield f"strategy={name} is {beyond[0]}, which quality={list(plan.quality)} does not allow"


MEMBERS = tuple(name for name in vars(Strategy) if not name.startswith("_"))


def check_members(strategy: object) -> None:
    """Raise ValueError with the first missing member if an object is not a Strategy.

    Classes of a user's own folder arrive here, so members are looked up by name.
    """
    lacking = [name for name in MEMBERS if inspect.getattr_static(strategy, name, None) is None]
    if not lacking:
        return
    kind = type(strategy)
    raise ValueError(
        f"{kind.__module__}.{kind.__qualname__} has no {lacking[0]}, which a Strategy needs: add it "
        f"({', '.join(MEMBERS)}; gnnpar.parallel.strategy describes them)"
    )


HALO = Capabilities(
    from_shards=True, edge_data=ALL_KINDS, moments=True, pair_loss=True, row_order=True, learned_features=True
)
"""Capabilities of a strategy that reads halo rows: its ranks hold all rows of a layer at once."""


@dataclass(frozen=True, kw_only=True)
class FlatStrategy:
    """A strategy that runs with any setting, and is its own exact limit. `mode`, `how`: `LayerFacts` of every layer."""

    mode: ClassVar[str] = ""

    @property
    def how(self) -> str:
        return ""

    def exact_limit(self) -> Self:
        return self

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        """Accept every configuration."""

    def plan(self, workload: Workload, topology: Topology) -> Plan:
        return workload.flat_plan(topology)

    def describe(self, plan: Plan) -> Sequence[LayerFacts]:
        return (LayerFacts(mode=self.mode, how=self.how),) * plan.num_layers


@dataclass(frozen=True, kw_only=True)
class CodedStrategy(FlatStrategy):
    """A strategy that sends rows by `codec` in training. It is exact with the identity codec and these fields.

    `limit`: fields of the exact limit, with their values; `beyond`: the kind of inexactness of other values.
    """

    codec: CodecConfig = Identity()
    limit: ClassVar[Mapping[str, object]] = {}
    beyond: ClassVar[Exactness] = "stale"

    @property
    def at_limit(self) -> bool:
        """Return True if at most the codec makes the strategy inexact."""
        return all(vars(self)[name] == value for name, value in self.limit.items())

    @property
    def exactness(self) -> frozenset[Exactness]:
        kinds = self.codec.exactness
        return kinds if self.at_limit else (kinds - {"exact"}) | frozenset[Exactness]({self.beyond})

    def exact_limit(self) -> Self:
        return replace(self, codec=Identity(), **self.limit)

    def check(self, num_ranks: int, num_layers: int, epochs: int) -> None:
        check_epochs(self.codec, epochs)
