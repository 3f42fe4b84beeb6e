"""One training by the public code of PipeGCN or BNS-GCN, on CPUs: its loss in every epoch.

Runs in an environment of its own that has DGL, without gnnpar; `run.py` starts it. The code is used as it lies in its
folder: what it asks of CUDA is answered by the CPU, packages that it imports and does not need here are stand-ins, and
the graph, its parts and the initial weights are set from outside. The second bias of a layer, which only doubles the
step of the first, is left out, and gradients are summed when all are there: its own threads may write a sum before
autograd has put the gradient in its place.

    python original.py --method pipegcn --code FOLDER --inputs inputs.npz --out losses.json --n-epochs=60 ...
"""

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import types
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import Any  # third-party code without types

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

RANKS = 2


class Nothing:
    """A stream, an event, a memory statistic: whatever is asked of it does nothing."""

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: Nothing()


@contextlib.contextmanager
def no_stream(_: object) -> Iterator[None]:
    yield


class CudaOnCpu:
    """torch.cuda of the public code."""

    Stream = Event = Nothing
    stream = staticmethod(no_stream)

    def __getattr__(self, name: str) -> Any:
        return lambda *_args, **_kwargs: Nothing() if name == "current_stream" else 0


class TorchOnCpu:
    """torch of the public code: tensors on a GPU, or in pinned memory, are plain ones."""

    cuda = CudaOnCpu()

    def __getattr__(self, name: str) -> Any:
        found = getattr(torch, name)
        return plain(found) if name in ("zeros", "zeros_like", "arange", "as_tensor") else found

    @staticmethod
    def device(*_: object) -> torch.device:
        return torch.device("cpu")


def plain(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        return make(*args, **{k: v for k, v in kwargs.items() if k not in ("device", "pin_memory")})

    return made


LOSSES: list[float] = []


class Recorded(torch.nn.CrossEntropyLoss):
    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        loss = super().forward(*args)
        LOSSES.append(loss.item())
        return loss


class WholeSum:
    """Its reducer: gradients are summed over ranks once all of them are there."""

    def init(self, model: torch.nn.Module) -> None:
        self.waiting: list[tuple[torch.nn.Parameter, int]] = []

    def reduce(self, param: torch.nn.Parameter, name: str, data: torch.Tensor, n_train: int) -> None:
        self.waiting.append((param, n_train))

    def synchronize(self) -> None:
        where = {id(param): i for i, param in enumerate(self.order)}
        for param, n_train in sorted(self.waiting, key=lambda each: where[id(each[0])]):
            dist.all_reduce(param.grad)
            param.grad /= n_train
        self.waiting.clear()

    order: tuple[torch.nn.Parameter, ...] = ()


def load(code: str, inputs: Any) -> tuple[types.ModuleType, types.ModuleType]:
    """Its modules `train` and `helper.utils`, prepared."""
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self
    torch.nn.Module.cuda = lambda self, *_args, **_kwargs: self
    torch.nn.CrossEntropyLoss = Recorded
    for name, members in {
        "ogb": (),
        "ogb.nodeproppred": ("DglNodePropPredDataset",),
        "sklearn": (),
        "sklearn.preprocessing": ("StandardScaler",),
        "sklearn.metrics": ("f1_score",),
    }.items():
        module = sys.modules.setdefault(name, module_from_spec(ModuleSpec(name, None)))
        for member in members:
            setattr(module, member, None)
    import dgl
    import dgl.distributed.partition
    import dgl.function

    if not hasattr(dgl.function, "copy_src"):  # its name before DGL 1.0
        dgl.function.copy_src = lambda src, out: dgl.function.copy_u(src, out)
    part_of = torch.from_numpy(inputs["part_of"])
    dgl.distributed.partition.metis_partition_assignment = lambda *_args, **_kwargs: part_of
    sys.path.insert(0, code)
    import train
    from helper import context, utils

    for module in list(sys.modules.values()):
        lies_there = str(getattr(module, "__file__", None)).startswith(code)
        if lies_there and getattr(module, "torch", None) is torch:
            module.torch = TorchOnCpu()

    def graph(*_: object) -> tuple[Any, int, int]:
        made = dgl.graph(tuple(torch.from_numpy(inputs["edge_index"])), num_nodes=len(part_of))
        for ours, theirs in (("x", "feat"), ("y", "label")):
            made.ndata[theirs] = torch.from_numpy(inputs[ours])
        for mask in ("train_mask", "val_mask", "test_mask"):
            made.ndata[mask] = torch.from_numpy(inputs[mask])
        made = dgl.add_self_loop(dgl.remove_self_loop(made))
        return made, inputs["x"].shape[1], int(inputs["y"].max()) + 1

    create = train.create_model

    def with_weights(*args: Any) -> torch.nn.Module:
        model = create(*args)
        for i, layer in enumerate(model.layers):
            own, neighbours, bias = (
                torch.from_numpy(inputs[f"{name}.{i}"].copy()) for name in ("own", "neighbours", "bias")
            )
            if layer.use_pp:
                layer.linear.weight.data, layer.linear.bias.data = torch.cat([own, neighbours], dim=1), bias
            else:
                layer.linear1.weight.data, layer.linear1.bias.data = own, bias
                layer.linear2.weight.data, layer.linear2.bias = neighbours, None
        WholeSum.order = tuple(model.parameters())
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
    inputs = np.load(options.inputs)
    train, _ = load(options.code, inputs)
    args = settings_of(options, inputs)
    if options.first_rows:
        begin_with_first_rows(args.corr_momentum)
    np.random.seed(1000 * args.seed + rank)  # the draws of BNS-GCN, each rank's own
    train.init_processes(rank, RANKS, args)
    Path(f"losses.{rank}.json").write_text(json.dumps(LOSSES))


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--method", choices=["pipegcn", "bns"], required=True)
    parser.add_argument("--code", required=True, help="folder of the public code")
    parser.add_argument("--inputs", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--first-rows", action="store_true", help="running means begin with the first rows")
    options, options.rest = parser.parse_known_args()
    options.code, options.inputs = (str(Path(name).resolve()) for name in (options.code, options.inputs))
    options.out = options.out.resolve()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        options.port = free.getsockname()[1]
    inputs = np.load(options.inputs)
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        tempfile.tempdir = os.environ["TMPDIR"] = folder  # torch unpickles what a rank leaves among temporary files
        _, utils = load(options.code, inputs)
        args = settings_of(options, inputs)
        utils.graph_partition(*([utils.load_data()[0]] if options.method == "pipegcn" else []), args)
        mp.spawn(rank_main, (options, folder), nprocs=RANKS)
        ranks = [json.loads(Path(f"losses.{rank}.json").read_text()) for rank in range(RANKS)]
        options.out.write_text(json.dumps([sum(each) / args.n_train for each in zip(*ranks, strict=True)]))
        os.chdir("/")


if __name__ == "__main__":
    main()
