"""One training by the public code of PipeGCN or BNS-GCN, on CPUs: its loss in every epoch.

Runs in an environment of its own that has DGL, without gnnpar; `run.py` starts it. The code is used as it lies in its
folder: what it asks of CUDA is answered by the CPU, packages that it imports and does not need here are stand-ins, and
the graph, its parts and the initial weights are set from outside. The second bias of a layer, which only doubles the
step of the first, is left out, and gradients are summed when all are there: its own threads may write a sum before
autograd has put the gradient in its place.

    python original.py --method pipegcn --code FOLDER --inputs inputs.pt --out losses.json --n-epochs=60 ...
"""

import argparse
import json
import os
import socket
import sys
import tempfile
import types
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any  # third-party code without types
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2
UNUSED = ("ogb", "ogb.nodeproppred", "sklearn", "sklearn.preprocessing", "sklearn.metrics")
LOSSES: list[float] = []


def on_cpu() -> types.ModuleType:
    """Return torch of the public code: streams and events do nothing, tensors on a GPU or in pinned memory are plain
    ones."""

    def plain(make: Any) -> Any:
        return lambda *args, device=None, pin_memory=None, **kwargs: make(*args, **kwargs)

    module = types.ModuleType("torch")
    vars(module).update(vars(torch), cuda=MagicMock(), device=lambda *_: torch.device("cpu"))
    vars(module).update({name: plain(vars(torch)[name]) for name in ("zeros", "zeros_like", "arange", "as_tensor")})
    for what in ("memory_allocated", "max_memory_allocated", "memory_reserved"):  # which it divides and prints
        setattr(module.cuda, what, lambda: 0)
    return module


class Recorded(torch.nn.CrossEntropyLoss):
    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        loss = super().forward(*args)
        LOSSES.append(loss.item())
        return loss


class WholeSum:
    """Its reducer: gradients are summed over ranks once all of them are there."""

    def init(self, model: torch.nn.Module) -> None:
        self.params = list(model.parameters())

    def reduce(self, param: torch.nn.Parameter, name: str, data: torch.Tensor, n_train: int) -> None:
        self.n_train = n_train

    def synchronize(self) -> None:
        for param in self.params:
            dist.all_reduce(param.grad)
            param.grad /= self.n_train


def load(code: str, inputs: Any) -> tuple[types.ModuleType, types.ModuleType]:
    """Its modules `train` and `helper.utils`, prepared."""
    for each in (torch.Tensor, torch.nn.Module):
        each.cuda = each.pin_memory = lambda self, *_args, **_kwargs: self
    torch.nn.CrossEntropyLoss = Recorded
    for name in UNUSED:
        sys.modules.setdefault(name, MagicMock(__spec__=ModuleSpec(name, None)))
    import dgl
    import dgl.distributed.partition
    import dgl.function

    if not hasattr(dgl.function, "copy_src"):  # its name before DGL 1.0
        dgl.function.copy_src = lambda src, out: dgl.function.copy_u(src, out)
    dgl.distributed.partition.metis_partition_assignment = lambda *_args, **_kwargs: inputs["part_of"]
    sys.path.insert(0, code)
    import train
    from helper import context, utils

    for module in list(sys.modules.values()):
        if str(getattr(module, "__file__", None)).startswith(code) and getattr(module, "torch", None) is torch:
            module.torch = on_cpu()

    def graph(*_: object) -> tuple[Any, int, int]:
        made = dgl.graph(tuple(inputs["edge_index"]), num_nodes=len(inputs["x"]))
        masks = {mask: mask for mask in ("train_mask", "val_mask", "test_mask")}
        made.ndata.update({name: inputs[given] for name, given in {"feat": "x", "label": "y", **masks}.items()})
        return dgl.add_self_loop(dgl.remove_self_loop(made)), inputs["x"].shape[1], int(inputs["y"].max()) + 1

    create = train.create_model

    def with_weights(*args: Any) -> torch.nn.Module:
        model = create(*args)
        for i, layer in enumerate(model.layers):
            own, neighbours, bias = (inputs[f"{name}.{i}"].clone() for name in ("own", "neighbours", "bias"))
            if layer.use_pp:
                layer.linear.weight.data, layer.linear.bias.data = torch.cat([own, neighbours], dim=1), bias
            else:
                layer.linear1.weight.data, layer.linear1.bias.data = own, bias
                layer.linear2.weight.data, layer.linear2.bias = neighbours, None
        return model

    cut = utils.partition_graph
    utils.partition_graph = lambda *args, reshuffle=True, **kwargs: cut(*args, **kwargs)  # DGL 1.1 always does
    utils.load_data = graph
    train.load_data = graph
    train.create_model = with_weights
    context.reducer = WholeSum()
    return train, utils


def begin_with_first_rows(momentum: float) -> None:
    """Its running means, which begin with zeros, begin with the first rows that arrive instead, as ours do."""
    from helper.feature_buffer import Buffer

    reads: dict[int, int] = {}

    def asked(_: object) -> float:
        """Twice in an update of one mean, which is `t` there."""
        mean = sys._getframe(1).f_locals.get("t")
        reads[id(mean)] = reads.get(id(mean), 0) + 1
        return 0.0 if reads[id(mean)] <= 2 else momentum

    Buffer._corr_momentum = property(asked, lambda _self, _value: None)


def settings_of(options: argparse.Namespace, inputs: Any) -> Any:
    """Its own command line."""
    from helper.parser import create_parser

    sys.argv = ["main.py", *options.rest]
    args = create_parser()
    args.n_partitions, args.graph_name, args.port = RANKS, "ours", options.port
    args.n_feat, args.n_class = inputs["x"].shape[1], int(inputs["y"].max()) + 1
    args.n_train = int(inputs["train_mask"].sum())
    return args


def rank_main(rank: int, options: argparse.Namespace, folder: str) -> None:
    torch.set_num_threads(1)
    os.chdir(folder)
    inputs = torch.load(options.inputs, weights_only=True)
    train, _ = load(options.code, inputs)
    args = settings_of(options, inputs)
    if options.first_rows:
        begin_with_first_rows(args.corr_momentum)
    np.random.seed(1000 * args.seed + rank)  # the draws of BNS-GCN, each rank's own
    train.init_processes(rank, RANKS, args)
    Path(f"losses.{rank}.json").write_text(json.dumps(LOSSES))


def main() -> None:
    parser = argparse.ArgumentParser()
    for name in ("method", "code", "inputs", "out"):  # pipegcn or bns, the folder of its code, files
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--first-rows", action="store_true", help="running means begin with the first rows")
    options, options.rest = parser.parse_known_args()
    options.code, options.inputs, options.out = map(os.path.realpath, (options.code, options.inputs, options.out))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options.port = free.getsockname()[1]
    inputs = torch.load(options.inputs, weights_only=True)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        tempfile.tempdir = os.environ["TMPDIR"] = folder  # torch unpickles what a rank leaves among temporary files
        _, utils = load(options.code, inputs)
        args = settings_of(options, inputs)
        utils.graph_partition(*([utils.load_data()[0]] if options.method == "pipegcn" else []), args)
        mp.spawn(rank_main, (options, folder), nprocs=RANKS)
        ranks = [json.loads(Path(f"losses.{rank}.json").read_text()) for rank in range(RANKS)]
        Path(options.out).write_text(json.dumps([sum(each) / args.n_train for each in zip(*ranks, strict=True)]))
        os.chdir("/")


if __name__ == "__main__":
    main()
