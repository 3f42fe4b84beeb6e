"""Worker: the models on DGL's layers, in an environment that has DGL. kind=dgl: whole graph; dgl_batches: mini-batches;
dgl_sar: one of several ranks over SAR."""

import datetime
import os

os.environ.setdefault("DGLBACKEND", "pytorch")
import dgl
import dgl.nn
import torch
import torch.nn.functional as F
from serve import Epoch, Job, fill, serve, stepper, training
from torch import Tensor, nn

FANOUT = (15, 10, 5)  # from the training nodes outwards
BATCH = 1024


NAMES = {  # parameters of a layer -> the initial weights
    "gcn": {"weight": "weight", "bias": "bias"},
    "sage": {"fc_neigh.weight": "neighbours", "fc_self.weight": "own.weight"},
    "gat": {"fc.weight": "weight", "attn_l": "attend_src", "attn_r": "attend_dst", "bias": "bias"},
}


class Net(nn.Module):
    """Layers with an activation between them; `graphs`: one for each layer, or one for all."""

    def __init__(self, model: str, weights: list[dict[str, Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layer_of(model, given) for given in weights)
        self.act = F.elu if model == "gat" else F.relu
        self.train()

    def forward(self, graphs, x: Tensor) -> Tensor:
        for index, layer in enumerate(self.layers):
            x = self.act(x) if index else x
            x = layer(graphs[index] if isinstance(graphs, list) else graphs, x).flatten(1)  # heads of GAT
        return x


def layer_of(model: str, given: dict[str, Tensor]) -> nn.Module:
    names = dict(NAMES[model])
    if model == "gcn":
        layer = dgl.nn.GraphConv(*given["weight"].shape[::-1], norm="both", allow_zero_in_degree=True)
        given = {**given, "weight": given["weight"].T}
    elif model == "sage":
        layer = dgl.nn.SAGEConv(*given["neighbours"].shape[::-1], "mean")
        names["bias" if layer.fc_self.bias is None else "fc_self.bias"] = "own.bias"
    else:
        heads, width = given["attend_src"].shape
        layer = dgl.nn.GATConv(given["weight"].shape[1], width, heads, allow_zero_in_degree=True)
    fill(layer, given, names)
    return layer


def inputs(job: Job) -> tuple[Net, dgl.DGLGraph, Tensor, Tensor, Tensor]:
    """Return the model, the graph, features, labels and training nodes."""
    given = job.inputs
    graph = dgl.graph(tuple(given["edges"]), num_nodes=len(given["x"]))
    graph.create_formats_()
    return Net(job.model, given[job.model]), graph, given["x"], given["y"], given["train"].nonzero().flatten()


def whole_graph(job: Job) -> Epoch:
    model, graph, x, y, train = inputs(job)
    return training(model, lambda: model(graph, x), y, train)


def batches(job: Job) -> Epoch:
    import dgl.dataloading

    model, graph, x, y, train = inputs(job)
    sampler = dgl.dataloading.NeighborSampler(list(reversed(FANOUT)))  # DGL lists the layer of the features first
    loader = dgl.dataloading.DataLoader(graph, train, sampler, batch_size=BATCH, shuffle=True, num_workers=0)
    step = stepper(model)

    def epoch() -> float:
        total = 0.0
        for ids, outputs, blocks in loader:
            total += len(outputs) * step(lambda i=ids, o=outputs, b=blocks: F.cross_entropy(model(b, x[i]), y[o]))
        return total / len(train)

    return epoch


def sar_rank(job: Job) -> Epoch:
    """SAR's partition of the same cut: nodes are renumbered by part."""
    import sar
    from dgl.distributed.graph_partition_book import RangePartitionBook
    from sar.common_tuples import PartitionData, ShardEdgesAndFeatures

    meet, wait = f"file://{job.folder}/meet_{job.kind}", datetime.timedelta(seconds=120)
    torch.distributed.init_process_group("gloo", meet, wait, job.ranks, job.rank)
    sar.initialize_comms(job.rank, job.ranks, "127.0.0.1", "gloo")
    given = job.inputs
    edges, part_of = given["edges"], given["part_of"]
    order = torch.argsort(part_of, stable=True)
    place = torch.empty_like(order)
    place[order] = torch.arange(len(order))
    ends = torch.cumsum(torch.bincount(part_of, minlength=job.ranks), 0).tolist()
    ranges = list(zip([0, *ends[:-1]], ends, strict=True))
    src, dst = place[edges]
    shards = []
    for rank in range(job.ranks):
        chosen = (part_of[edges[0]] == rank) & (part_of[edges[1]] == job.rank)
        types = {dgl.ETYPE: torch.zeros(int(chosen.sum()), dtype=torch.int32)}
        shards.append(ShardEdgesAndFeatures((src[chosen], dst[chosen]), types))
    first, last = ranges[job.rank]
    mine = order[first:last]
    features = {dgl.NTYPE: torch.zeros(last - first, dtype=torch.int32)}
    kind = ("_N", "_E", "_N")
    nodes = {"_N": torch.tensor(ranges)}
    edge_ends = torch.cumsum(torch.bincount(part_of[edges[1]], minlength=job.ranks), 0).tolist()
    edge_ranges = {kind: torch.tensor(list(zip([0, *edge_ends[:-1]], edge_ends, strict=True)))}
    book = RangePartitionBook(job.rank, job.ranks, nodes, edge_ranges, {"_N": 0}, {kind: 0})
    graph = sar.construct_full_graph(PartitionData(shards, ranges, features, ["_N"], [kind], book))
    if job.model == "gat":  # sar.patch_dgl tests for the graph of one relation, which GATConv cannot use
        dgl.nn.pytorch.conv.gatconv.edge_softmax = sar.edge_softmax
    model = Net(job.model, given[job.model])
    step = stepper(model, lambda: sar.gather_grads(model))
    x, y, mask = given["x"][mine], given["y"][mine], given["train"]
    train, count = mask[mine].nonzero().flatten(), int(mask.sum())

    def epoch() -> float:
        found = step(lambda: F.cross_entropy(model(graph, x)[train], y[train], reduction="sum") / count)
        total = torch.tensor(found)
        torch.distributed.all_reduce(total)
        return total.item()

    return epoch


MAKES = {"dgl": whole_graph, "dgl_batches": batches, "dgl_sar": sar_rank}
serve(lambda job: MAKES[job.kind](job))
