"""Compare a strategy in its exact limit with the single device, and an inexact strategy with its oracle. fp64, ranks as
threads, dropout on."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from gnnpar.codecs.codec import Identity
from gnnpar.comm import Communicator, ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.data.tasks import Labels, TaskConfig, make_task
from gnnpar.files import JsonDict
from gnnpar.models.gnn import GNN, ModelSource
from gnnpar.models.pairs import with_scorer
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.context import BuildContext
from gnnpar.parallel.engine import Engine, FlatEngine
from gnnpar.parallel.needs import check_first_layer, orders_rows, refuse, refuse_edge_data
from gnnpar.parallel.oracle import WithOracle, WithOracleEngine
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import CodedStrategy, Strategy, Workload
from gnnpar.parallel.view import FirstLayer
from gnnpar.partition.partition import Partitioner, Random
from gnnpar.partition.row_order import Order, in_order
from gnnpar.partition.shard import Shard
from gnnpar.placement import Plan, Topology
from gnnpar.training.optim import SGD, Adam
from gnnpar.verify.differences import TOLERANCE, relative_error, rounding
from gnnpar.verify.soundness import find_fault, with_edge_data
from gnnpar_kernels.csr import accumulate_dtype

EPOCHS = 2
ORACLE_EPOCHS = 4
"""Enough epochs for stale rows, and means over epochs, to differ."""
CPU = torch.device("cpu")
AS_CONFIGURED = "single device, as configured"


@dataclass(frozen=True)
class Case:
    """One model on one world: the largest relative differences over the compared epochs, against `reference`."""

    model: str
    world: int
    loss_error: float
    worst_gradient_error: float
    worst_parameter: str
    logits_error: float
    error: str | None = None
    reference: str = "single device"

    @property
    def passed(self) -> bool:
        worst = max(self.loss_error, self.worst_gradient_error, self.logits_error)
        return self.error is None and worst <= TOLERANCE


@dataclass(frozen=True, eq=False)
class Outcome:
    """Results of a run to compare: loss and gradient of every epoch, logits [N, C] in global order."""

    losses: list[float]
    gradients: list[dict[str, Tensor]]
    logits: Tensor
    traffic: list[dict[str, int]]  # bytes by phase, all ranks, per epoch


def small_graph(*, num_nodes: int = 60, num_edges: int = 400, seed: int = 0) -> Dataset:
    """Return a directed graph with self loops on most nodes, isolated nodes and repeated edges."""
    gen = torch.Generator().manual_seed(seed)
    alone = max(0, min(2, num_nodes - 2))  # the last nodes have no edge
    ends = torch.randint(0, max(1, num_nodes - alone), (2, num_edges), generator=gen)
    loops = torch.arange(max(1, num_nodes - alone)).expand(2, -1)
    repeated = ends[:, : num_edges // 20]
    edges = torch.cat([ends, loops, repeated], dim=1)
    edges = edges[:, torch.argsort(edges[1] * num_nodes + edges[0], stable=True)]
    x = torch.randn(num_nodes, 6, generator=gen)
    y = torch.randint(0, 3, (num_nodes,), generator=gen)
    kind = torch.rand(num_nodes, generator=gen)
    masks = (kind < 0.6, (kind >= 0.6) & (kind < 0.8), kind >= 0.8)
    return Dataset.of("small", x=x, y=y, edge_index=edges, masks=masks, num_classes=3, task="single_label")


@dataclass(frozen=True, eq=False)
class Job:
    """One training to compare: the function of every rank. Picklable, so ranks may be processes."""

    strategy: Strategy
    model: GNN
    dataset: Dataset
    plan: Plan
    epochs: int
    seed: int
    first_layer: FirstLayer
    dtype: torch.dtype
    optim: Adam | SGD = SGD(lr=0.1)
    task: TaskConfig = Labels()
    row_order: Order = "none"

    def __call__(self, comm: Communicator) -> tuple[list[float], list[dict[str, Tensor]], Tensor, Tensor, list[dict]]:
        """Return (losses, gradients, node ids, logits, bytes by phase) of this rank."""
        task = self.task.of(self.dataset.task, self.dataset.num_classes)
        model = on_device(copy.deepcopy(self.model).to(accumulate_dtype(self.dtype)), comm.device)
        given = self.dataset if comm.rank == 0 else None
        shard = Shard.open(
            given, self.plan.part_of, comm, edge_ids=model.needs_edge_ids, placement=self.plan.placement
        ).to(comm.device, self.dtype)
        shard, _ = in_order(shard, self.row_order if orders_rows(self.strategy, self.task) else "none")
        fixed = {name: p.clone() for name, p in model.named_parameters() if not p.requires_grad}
        context = BuildContext(
            plan=self.plan,
            shard=shard,
            model=model,
            task=task,
            comm=comm,
            seed=self.seed,
            first_layer=self.first_layer,
        )
        engine = self.strategy.build(context)
        optimizer = self.optim.build(engine.named_parameters(), epochs=self.epochs, layer_of=model.layer_of)
        losses, gradients, traffic = [], [], []
        for epoch in range(self.epochs):
            report = engine.train_epoch(epoch, optimizer, keep_gradient=True)
            assert report.gradient is not None
            losses.append(report.loss)
            gradients.append(report.gradient)
            comm.settle_accounts()
            traffic.append(comm.ledger.drain().bytes)
        for name in (name for name, p in engine.named_parameters() if not torch.equal(p, fixed.get(name, p))):
            raise ValueError(f"{name} is frozen (requires_grad_(False)), and has moved")
        engine.drain()
        return losses, gradients, engine.node_ids, engine.predict(), traffic


def on_device(model: GNN, device: torch.device) -> GNN:
    return model.to(device)


def make_job(
    strategy: Strategy,
    config: ModelSource,
    dataset: Dataset,
    *,
    world: int,
    epochs: int = EPOCHS,
    seed: int = 3,
    partition: Partitioner | None = None,
    first_layer: FirstLayer = "live",
    dtype: torch.dtype = torch.float64,
    optim: Adam | SGD = SGD(lr=0.1),
    task: TaskConfig = Labels(),
    row_order: Order = "none",
) -> Job:
    """Build the model once (threads share torch's random state) and plan. dataset: with the examples of the task."""
    model = config.on(dataset.edge_sizes).build(
        dataset.num_features,
        task.of(dataset.task, dataset.num_classes).out_dim,
        seed=seed,
        cached_first_layer=first_layer == "cached",
    )
    model = with_scorer(model, task.decoder, seed)
    work = Workload(dataset, partition or Random(), model.num_layers, model=model, first_layer=first_layer)
    plan = strategy.plan(work, Topology(world))
    return Job(strategy, model, dataset, plan, epochs, seed, first_layer, dtype, optim, task, row_order)


def merge_ranks(job: Job, results: Sequence[tuple]) -> Outcome:
    """Merge the results of all ranks of a job in global terms."""
    out_dim = results[0][3].shape[1]
    logits = torch.full((job.dataset.num_nodes, out_dim), torch.nan, dtype=accumulate_dtype(job.dtype))
    merged: list[dict[str, Tensor]] = [{} for _ in range(job.epochs)]
    traffic: list[dict[str, int]] = [{} for _ in range(job.epochs)]
    for _, gradients, ids, rows, sent in results:
        logits[ids.cpu()] = rows.cpu()
        for epoch in range(job.epochs):
            merged[epoch].update({name: g.cpu() for name, g in gradients[epoch].items()})
            for phase, nbytes in sent[epoch].items():
                traffic[epoch][phase] = traffic[epoch].get(phase, 0) + nbytes
    return Outcome(results[0][0], merged, logits, traffic)


def train_in_threads(
    strategy: Strategy, config: ModelSource, dataset: Dataset, *, world: int, device: torch.device = CPU, **options
) -> Outcome:
    """Train on a world of threads that share a device. Options as in make_job. The outcome is on the CPU."""
    job = make_job(strategy, config, dataset, world=world, **options)
    return merge_ranks(job, ThreadWorld(world, device=device).run(job))


def check(
    strategy: Strategy,
    models: Mapping[str, ModelSource],
    *,
    worlds: Sequence[int] = (1, 2, 3, 4),
    dataset: Dataset | None = None,
    as_it_is: bool = False,
    given: Dataset | None = None,
    first_layer: FirstLayer = "live",
    row_order: Order = "none",
    device: torch.device = CPU,
) -> list[Case]:
    """Compare every model on every world that the strategy can use.

    Compare its exact limit with the single device, and the strategy as configured if it claims to be exact. Compare an
    inexact strategy with its oracle, if it has one.
    dataset: a graph to use, by default a small one. as_it_is: keep its edges and their data; otherwise they are
    replaced as the model requires. given: the same graph unprepared, on which PyG runs a PyG model.
    Ranks run on `device`, references on the CPU. An unsound model has one case, which names the fault. ValueError if
    `exact_limit` does not claim to be exact.
    """
    dataset = dataset or small_graph()
    limit = strategy.exact_limit()
    check_first_layer(strategy, first_layer)
    if limit.exactness != {"exact"} or limit.capabilities.crosses_epochs:
        stale = " and reads rows of earlier epochs" if limit.capabilities.crosses_epochs else ""
        raise ValueError(f"exact_limit() of {type(strategy).__name__} is {', '.join(sorted(limit.exactness))}{stale}")
    faults = {name: find_fault(config, dataset if as_it_is else None) for name, config in models.items()}
    cases = [_failed(name, 1, str(fault)) for name, fault in faults.items() if fault is not None]
    models = {name: config for name, config in models.items() if faults[name] is None}
    how: JsonDict = {"first_layer": first_layer, "row_order": row_order}
    graphs = {name: dataset if as_it_is else graph_for(strategy, config, dataset) for name, config in models.items()}
    for name, config in models.items():
        if as_it_is:
            refuse_edge_data(strategy, config, dataset.edges.kinds, dataset.in_weight, dataset.name, {"model": name})
        refuse(strategy, config, {"model": name})
        if config.wraps:
            cases.append(_pyg_case(name, config, graphs[name], given))
        reference = train_in_threads(Single(), config, graphs[name], world=1)
        for world in (w for w in worlds if runs_on(limit, w, config)):
            cases.append(compared(limit, name, config, graphs[name], world, reference, device, how))
        if strategy.exactness == {"exact"} and strategy != limit:
            for world in (w for w in worlds if runs_on(strategy, w, config)):
                case = compared(strategy, name, config, graphs[name], world, reference, device, how)
                cases.append(replace(case, reference=AS_CONFIGURED))
    if isinstance(strategy, WithOracle | WithOracleEngine) and strategy.exactness != {"exact"}:
        for name, config in models.items():
            for world in (w for w in worlds if runs_on(strategy, w, config, epochs=ORACLE_EPOCHS)):
                of_oracle = {"row_order": row_order, "epochs": ORACLE_EPOCHS}  # it computes layer 0 in every epoch
                cases += _oracle_case(strategy, name, config, graphs[name], world, device, of_oracle)
    return cases


@dataclass(frozen=True, kw_only=True)
class _Oracle(Single):
    """One device that computes the result of `strategy` under `parts`, a plan of several ranks."""

    strategy: WithOracle | WithOracleEngine
    parts: Plan

    def build(self, context: BuildContext) -> Engine:
        engine = self.engine(context)
        assert engine is not None
        return engine

    def engine(self, context: BuildContext) -> Engine | None:
        """Return the oracle's engine. None for a strategy without an oracle, and for any strategy with a codec."""
        strategy = self.strategy
        if isinstance(strategy, WithOracleEngine):
            return strategy.oracle_engine(self.parts, context)
        if isinstance(strategy, CodedStrategy) and not isinstance(strategy.codec, Identity):
            return None
        view = strategy.oracle(self.parts, context.shard, seed=context.seed)
        return FlatEngine(context, view=view, exact=WholeGraph(context.shard, context.start))


def _oracle_case(
    strategy: Strategy,
    name: str,
    config: ModelSource,
    dataset: Dataset,
    world: int,
    device: torch.device,
    how: JsonDict,
) -> list[Case]:
    """Compare with the oracle; return no case if the configured strategy has none."""
    assert isinstance(strategy, WithOracle | WithOracleEngine)
    job = make_job(strategy, config, dataset, world=world)
    (comm,), none = ThreadWorld(1).communicators(), torch.zeros(dataset.num_nodes).long()
    whole = Shard.open(dataset, none, comm, edge_ids=job.model.needs_edge_ids)
    oracle = _Oracle(strategy=strategy, parts=job.plan)
    task = make_task(dataset.task, dataset.num_classes)
    context = BuildContext(plan=job.plan, shard=whole, model=job.model, task=task, comm=comm, seed=0)
    if oracle.engine(context) is None:
        return []
    reference = train_in_threads(oracle, config, dataset, world=1, epochs=ORACLE_EPOCHS)
    case = compared(strategy, name, config, dataset, world, reference, device, how)
    return [replace(case, reference="its oracle")]


def runs_on(strategy: Strategy, world: int, config: ModelSource, *, epochs: int = EPOCHS) -> bool:
    """Return True if the strategy can use `world` ranks. A pipeline has at most one stage per layer."""
    limit = strategy.capabilities.max_ranks
    if limit is not None and world > limit:
        return False
    try:
        strategy.check(world, config.num_layers, epochs)
    except ValueError:
        return False
    return True


def compared(
    limit: Strategy,
    name: str,
    config: ModelSource,
    dataset: Dataset,
    world: int,
    reference: Outcome,
    device: torch.device,
    how: JsonDict,
) -> Case:
    """Compare one model under one strategy on one world with `reference`. how: options of `make_job`."""
    try:
        got = train_in_threads(limit, config, dataset, world=world, device=device, **how)
    except Exception as error:  # a user's strategy may raise anything: report it as a row of the table
        return _failed(name, world, f"{type(error).__name__}: {error}")
    worst, parameter = 0.0, ""
    for mine, theirs in zip(got.gradients, reference.gradients, strict=True):
        least = rounding(theirs.values(), dataset.num_nodes)
        for key, expected in theirs.items():
            error = relative_error(mine.get(key), expected, least=least)
            if error >= worst:
                worst, parameter = error, key
    losses = zip(got.losses, reference.losses, strict=True)
    loss_error = max(abs(a - b) / max(abs(b), 1e-300) for a, b in losses)
    return Case(name, world, loss_error, worst, parameter, relative_error(got.logits, reference.logits))


def graph_for(strategy: Strategy, config: ModelSource, dataset: Dataset) -> Dataset:
    """Return the graph with edge data that the model reads and the strategy supports; weights for PyG models only."""
    if not config.wraps:
        carried = config.edge_data & strategy.capabilities.edge_data - {"weight"}
        return with_edge_data(dataset, carried - dataset.edges.kinds)
    from gnnpar.verify.pyg_reference import prepared  # imports PyG

    return prepared(dataset, config, carried=strategy.capabilities.edge_data)


def _pyg_case(name: str, config: ModelSource, dataset: Dataset, given: Dataset | None) -> Case:
    from gnnpar.verify.pyg_reference import difference  # imports PyG

    found = difference(config, dataset, TOLERANCE, given)
    errors = found.gradients | {f"{each} after the steps": error for each, error in found.state.items()}
    parameter = max(errors, key=lambda each: errors[each])
    error = f"{found.module} is the first module that differs" if found.module else None
    if found.replaced:
        error = f"{found.replaced} is another tensor after a forward: the model does not run on the trained parameter"
    elif error and given is not None and given.num_edges != dataset.num_edges:
        error += (
            f"; PyG runs on the {given.num_edges} edges that were given, of which preprocessing makes "
            f"{dataset.num_edges}: set dataset.self_loops=keep dataset.drop_duplicates=false"
        )
    return Case(name, 1, found.loss, errors[parameter], parameter, found.logits, error, reference="PyG")


def _failed(model: str, world: int, error: str) -> Case:
    inf = float("inf")
    return Case(model, world, inf, inf, "", inf, error)
