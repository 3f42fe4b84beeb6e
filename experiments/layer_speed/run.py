"""Layers, weighted sums and mapped models beside what they are held to, and what a start from Python costs.

A race is of two or more calls that compute the same. They take turns, in an order of the block's own, so that a slow
minute of the machine hits all of them. The checkout must be clean: each line names its commit.
"""

import itertools
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from timeit import timeit
from typing import Any  # of JSON

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric import nn as pyg

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "tests"))

import records
from blocks import shuffled
from epochs import alone, block_model, facts, gnnpar_epoch, peak_bytes
from records import Files

import startup
from gnnpar.data.dataset import Dataset
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.sum import Sum
from gnnpar.models.gat import GAT
from gnnpar.models.gatv2 import GATv2, GATv2Conv
from gnnpar.models.gcn import GCN
from gnnpar.models.gnn import ModelSource
from gnnpar.models.initial import construct
from gnnpar.models.pyg.model import PyG
from gnnpar.models.rgcn import RGCN, RGCNConv
from gnnpar.models.sage import SAGE
from gnnpar.models.transformer import TransformerConv
from gnnpar.parallel.blocks import WholeGraph
from gnnpar.parallel.local import Pass
from gnnpar.parallel.single.strategy import Single
from gnnpar.partition.shard import Shard
from gnnpar.training.result.result import commit

NODES, SMALL = 50_000, 1_000
BLOCKS, SMOKE_BLOCKS = 10, 3
THREADS = (1, 2)
BLOCK_SECONDS = 0.2  # a call that is shorter is repeated
LONG_SECONDS = 1.0
PARTS = ("start", "layers", "sums", "models")
STARTS: Mapping[str, Mapping[str, object]] = {
    "one rank": {"strategy": "single"},
    "two ranks": {"strategy": "graph_parallel", "world_size": 2, "threads_per_rank": 1},
}
OURS, MAPPED, OWN, SAME_ORDER = "gnnpar", "mapped", "own", "own, PyG's order"
RELATIONS, NARROW = 8, 32
HEADS, WIDE = 4, 128
SUMS = (32, 128)  # widths of rows
CLOSE = 1e-4  # RMS of a difference over RMS, fp32

Tensors = tuple[Tensor, ...]
Call = Callable[[], Tensors]


@dataclass(frozen=True)
class Race:
    """Calls that take turns, by name. Of layers, the first two tensors of each agree: an output and the gradient of the
    input."""

    part: str
    case: str
    graph: Dataset
    calls: Mapping[str, Call]


def with_edges(dataset: Dataset, draw: Callable[[int, torch.Generator], EdgeData]) -> Dataset:
    kept = {key: vars(dataset)[key] for key in ("x", "y", "edge_index", "num_classes", "task")}
    masks = (dataset.train_mask, dataset.val_mask, dataset.test_mask)
    edges = draw(dataset.num_edges, torch.Generator().manual_seed(0))
    return Dataset.of(dataset.name, **kept, masks=masks, edges=edges)


def view_of(dataset: Dataset) -> WholeGraph:
    return WholeGraph(Shard.open(dataset, torch.zeros(dataset.num_nodes).long(), alone()), Pass(0, training=True))


def races(nodes: int, parts: Collection[str]) -> Iterator[Race]:
    """Yield the races of the given parts. Each is built when it is reached."""
    dataset, plain = block_model(nodes, features=WIDE), block_model(nodes, features=NARROW, loops=False)
    relational = with_edges(plain, lambda n, seed: EdgeData(type=torch.randint(RELATIONS, (n,), generator=seed)))
    if "layers" in parts:
        yield relational_layer(relational)
        yield attention_layer(dataset)
        yield dot_product_layer(dataset)
    if "sums" in parts:
        weighted = with_edges(dataset, lambda n, seed: EdgeData(weight=0.5 + torch.rand(n, generator=seed)))
        yield from (sums(weighted, width) for width in SUMS)
    if "models" in parts:
        yield from models(dataset, relational)


def both_ways(layer: Callable[[Tensor], Tensor], module: nn.Module, x: Tensor, grad: Tensor) -> Call:
    """Forward and backward, to the input and all parameters: -> output, gradients. Shapes: x [N, F], grad [N, F']."""
    wanted = (x, *module.parameters())

    def call() -> Tensors:
        out = layer(x)
        return out.detach(), *torch.autograd.grad(out, wanted, grad)

    return call


def rows_of(dataset: Dataset, width: int) -> tuple[Tensor, Tensor]:
    """An input and the gradient of an output. Shapes: -> [N, width] twice."""
    draw = torch.Generator().manual_seed(1)
    x, grad = (torch.randn(dataset.num_nodes, width, generator=draw) for _ in range(2))
    return x.requires_grad_(), grad


def layer_race(
    case: str, dataset: Dataset, ours: nn.Module, theirs: Mapping[str, nn.Module], width: int, *more: Tensor
) -> Race:
    """`more`: what theirs are called with behind rows and edges."""
    g = view_of(dataset)
    x, grad = rows_of(dataset, width)
    calls = {OURS: both_ways(lambda h: ours(g.at(0), h), ours, x, grad)}
    for name, layer in theirs.items():
        calls[name] = both_ways(lambda h, layer=layer: layer(h, dataset.edge_index, *more), layer, x, grad)
    return Race("layers", case, dataset, calls)


def relational_layer(dataset: Dataset) -> Race:
    ours = construct(lambda: RGCNConv(RGCN(num_relations=RELATIONS), NARROW, NARROW), 0)
    theirs = {kind.__name__: kind(NARROW, NARROW, RELATIONS) for kind in (pyg.RGCNConv, pyg.FastRGCNConv)}
    for layer in theirs.values():
        layer.load_state_dict({"weight": ours.neighbours, "root": ours.own.weight.T}, strict=False)
    return layer_race("R-GCN 32 to 32, 8 relations", dataset, ours, theirs, NARROW, dataset.edges.type)


def attention_layer(dataset: Dataset) -> Race:
    how = {"heads": HEADS, "average": False, "slope": 0.2, "attention_dropout": 0.0}
    ours = construct(lambda: GATv2Conv(WIDE, WIDE, **how), 0)
    theirs = pyg.GATv2Conv(WIDE, WIDE // HEADS, HEADS, add_self_loops=False)
    theirs.lin_l.load_state_dict(ours.left.state_dict())
    theirs.lin_r.load_state_dict(ours.right.state_dict())
    theirs.load_state_dict({"att": ours.attention[None]}, strict=False)
    return layer_race("GATv2 128 to 4 x 32", dataset, ours, {"GATv2Conv": theirs}, WIDE)


def dot_product_layer(dataset: Dataset) -> Race:
    how = {"heads": HEADS, "average": False, "attention_dropout": 0.0, "gated": True, "edge_dim": 0}
    ours = construct(lambda: TransformerConv(WIDE, WIDE, **how), 0)
    theirs = pyg.TransformerConv(WIDE, WIDE // HEADS, HEADS, beta=True)
    pairs = ((theirs.lin_key, ours.key), (theirs.lin_query, ours.query), (theirs.lin_value, ours.value))
    for linear, same in (*pairs, (theirs.lin_skip, ours.skip), (theirs.lin_beta, ours.gate)):
        none = {"bias": torch.zeros(linear.out_channels)}  # where ours has none
        linear.load_state_dict({**none, **same.state_dict()}, strict=False)
    return layer_race("transformer 128 to 4 x 32", dataset, ours, {"TransformerConv": theirs}, WIDE)


def sums(dataset: Dataset, width: int) -> Race:
    g, nothing = view_of(dataset), nn.Identity()
    x, grad = rows_of(dataset, width)
    calls = {
        name: both_ways(lambda h, fold=fold: g.at(0).aggregate(fold, (h,)), nothing, x, grad)
        for name, fold in {"unweighted": Sum(), "weighted": Sum(weighted=True)}.items()
    }
    return Race("sums", f"rows of {width}", dataset, calls)


SHAPE = {"num_layers": 3, "hidden": WIDE, "dropout": 0.5}
ATTENTION = {**SHAPE, "heads": HEADS, "out_heads": HEADS, "attention_dropout": 0.5}
THEIRS = {"num_layers": 3, "hidden_channels": WIDE, "dropout": 0.5}
HEADED = {"heads": HEADS, "act": "elu"}  # PyG's class gives `dropout` to attention, too


class Relational(nn.Module):
    """R-GCN as a user of PyG writes it.

    Shapes: x [N, in_channels], edge_index [2, E], edge_type [E] -> [N, out_channels].
    """

    def __init__(
        self, in_channels: int, hidden_channels: int, num_layers: int, out_channels: int, num_relations: int, p: float
    ) -> None:
        super().__init__()
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(pyg.RGCNConv(a, b, num_relations) for a, b in itertools.pairwise(widths))
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index, edge_type).relu(), self.p, self.training)
        return self.convs[-1](x, edge_index, edge_type)


def models(dataset: Dataset, relational: Dataset) -> Iterator[Race]:
    """An epoch of `single` each: modules of PyG, mapped, beside gnnpar's of the same shape. A call returns its loss."""
    gcn, sage, gat, v2 = (
        PyG(target=f"torch_geometric.nn.models.{name}", kwargs={**THEIRS, **how})
        for name, how in (("GCN", {}), ("GraphSAGE", {}), ("GAT", HEADED), ("GAT", {**HEADED, "v2": True}))
    )
    narrow = {"num_layers": 3, "hidden_channels": NARROW, "p": 0.5}
    rgcn = PyG(target="layer_speed.run.Relational", kwargs=narrow, self_loops=False)
    sources: dict[str, dict[str, ModelSource]] = {
        "GCN": {MAPPED: gcn, OWN: GCN(**SHAPE), SAME_ORDER: GCN(**SHAPE, order="transform_first")},
        "GraphSAGE": {MAPPED: sage, OWN: SAGE(**SHAPE), SAME_ORDER: SAGE(**SHAPE, order="aggregate_first")},
        "GAT": {MAPPED: gat, OWN: GAT(**ATTENTION)},
        "GATv2": {MAPPED: v2, OWN: GATv2(**ATTENTION)},
        "R-GCN": {MAPPED: rgcn, OWN: RGCN(num_layers=3, hidden=NARROW, dropout=0.5)},
    }
    for case, each in sources.items():
        graph = relational if case == "R-GCN" else dataset
        epochs = {name: gnnpar_epoch(graph, Single(), source, alone()) for name, source in each.items()}
        yield Race("models", case, graph, {name: lambda e=e: (torch.tensor(e()),) for name, e in epochs.items()})


def warm(call: Call) -> float:
    """Seconds of a second call, or of a first one that is long."""
    first = timeit(call, number=1)
    return first if first > LONG_SECONDS else timeit(call, number=1)


def differences(race: Race) -> dict[str, float]:
    """Of every call from the first, before anything is timed: of the output and of the gradient of the input, RMS of
    the difference over RMS."""
    if race.part != "layers":
        return {}
    outputs = {name: [each.double() for each in call()[:2]] for name, call in race.calls.items()}
    expected = outputs.pop(next(iter(race.calls)))
    found = {
        name: max(float((x - y).norm() / y.norm()) for x, y in zip(output, expected, strict=True))
        for name, output in outputs.items()
    }
    if max(found.values()) > CLOSE:
        raise SystemExit(f"{race.case}: calls do not compute the same: {found}")
    return found


def measure(race: Race, *, blocks: int, threads: Iterable[int]) -> Iterator[dict[str, Any]]:
    """A line a block and number of threads, and one of memory, which is measured on one thread."""
    row = {"part": race.part, "case": race.case, "nodes": race.graph.num_nodes, "edges": race.graph.num_edges}
    agreed = differences(race)
    for count in threads:
        torch.set_num_threads(count)
        times = {name: max(1, round(BLOCK_SECONDS / warm(call))) for name, call in race.calls.items()}
        for block in range(blocks):
            order = shuffled(race.calls, block)
            seconds = {name: timeit(race.calls[name], number=times[name]) / times[name] for name in order}
            yield {**row, "threads": count, "block": block, "calls": times, "seconds": seconds, **facts()}
    torch.set_num_threads(1)
    peaks = {name: peak_bytes(call) for name, call in race.calls.items()}
    yield {**row, "difference": agreed, "peak_bytes": peaks, **facts()}


def measure_start(case: str, *, blocks: int) -> Iterator[dict[str, Any]]:
    """The same training from the command line and from Python, on a graph of 3,000 nodes: CPU seconds of all processes
    until the line of the first epoch. A line a block."""
    given, python = {**STARTS[case], "tracker.every": 1}, [sys.executable, "-P"]
    line = ["-m", "gnnpar", "train", "dataset=sbm", "model=gcn", "epochs=3", "hydra.run.dir=run"]
    script = f"import gnnpar; gnnpar.train('gcn', 'sbm', epochs=3, folder='run', **{given!r})"
    both = {"gnnpar train": [*python, *line, *(f"{key}={value}" for key, value in given.items())]}
    both["gnnpar.train"] = [*python, "-c", script]
    for block in range(blocks):
        order = shuffled(both, block)
        seconds = {name: startup.cpu_seconds_of(both[name], "epoch 1/", ROOT) for name in order}
        yield {"part": "start", "case": case, "block": block, "seconds": seconds, **facts()}


def keep(out: Path, found: Iterable[dict[str, Any]]) -> None:
    """All lines of a case, or none."""
    rows = []
    for row in found:
        rows.append(row)
        if "seconds" in row:
            shown = ", ".join(f"{name} {seconds:.4f} s" for name, seconds in row["seconds"].items())
            threads = f", {row['threads']} threads" if "threads" in row else ""
            print(f"{row['part']} {row['case']}{threads}, block {row['block']}: {shown}", flush=True)
    records.append(out, rows)


def run(files: Files, *, part: tuple = PARTS, blocks: int = BLOCKS) -> None:
    """Measure races and starts. part: start, layers, sums, models. In a rehearsal, on a fiftieth of the graph."""
    if not files.smoke and str(commit()).endswith("+"):
        raise SystemExit("the checkout has changes: commit them, each line names its commit")
    blocks, threads = (SMOKE_BLOCKS, (1,)) if files.smoke else (blocks, THREADS)
    done = {(row["part"], row["case"]) for row in files.read()}
    for case in STARTS if "start" in part else ():
        if ("start", case) not in done:
            keep(files(), measure_start(case, blocks=blocks))
    for race in races(SMALL if files.smoke else NODES, part):
        if (race.part, race.case) not in done:
            keep(files(), measure(race, blocks=blocks, threads=threads))
