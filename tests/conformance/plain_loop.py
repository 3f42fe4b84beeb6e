"""A PyG model in PyG's own loop, and the same model under a strategy: equal numbers, or one line that says why not."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportIndexIssue=false, reportOptionalMemberAccess=false, reportOptionalSubscript=false

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import re
import tempfile
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.data import Data

from gnnpar.api import Run, TrainingFailed, _settings, _train
from gnnpar.data.saved import write_given
from gnnpar.settings import build_settings

NODES, WIDTH, CLASSES, EDGE_DIM, TYPES, EPOCHS, LR, TOLERANCE = 24, 8, 3, 4, 3, 3, 0.01, 1e-9
ROUNDING = 1e-13  # a gradient below it is none
STRATEGIES: dict[str, dict[str, object]] = {
    "single": {},
    "graph_parallel": {},
    "sar": {},
    "gnnpipe": {"strategy.chunks": "one"},
    "feature": {},
    "cagnet": {},
    "halo=cover": {"strategy": "graph_parallel", "strategy.halo": "cover"},
}
EDGE_KEYS = ("edge_weight", "edge_attr", "edge_type")
_INTERNAL = re.compile(
    r"gives no reason|Expected all tensors|out of (range|bounds)|size mismatch|shapes cannot|must match the size|"
    r"\b(Runtime|Index|Key|Type|Attribute|Assertion|NotImplemented|ZeroDivision|Unbound\w+|Name)Error\b|object has no|"
    r"Traceback|<[\w.]+ object at|internal assert|keyword argument|positional argument|must be one-dimensional"
)
_NAMES = re.compile(r"\b(net|conv|model|module|strategy|dataset|forward|layer|norm)\b|\w+(Conv|Net|Norm)\b|\w\.\w+")


@dataclass(frozen=True, eq=False)
class Trained:
    """What three steps leave: a loss a step, and all parameters and buffers by name. `largest`: gradient of each entry
    of a parameter; rounding alone moves some, as a bias in front of a BatchNorm, and Adam divides by its size."""

    losses: list[float]
    state: dict[str, Tensor]
    largest: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Verdict:
    """`kind`: equal, refused, skipped (PyG itself fails), or a failure: late, unclear, wrong, crashed, without."""

    kind: str
    why: str = ""

    @property
    def good(self) -> bool:
        """A late refusal is one line, too: of a rank, where the launcher could not know."""
        return self.kind in ("equal", "refused", "late", "skipped")

    def __str__(self) -> str:
        return f"{self.kind} {self.why}".strip()


@contextlib.contextmanager
def drawing(seed: int) -> Iterator[None]:
    """Weights depend on the seed alone: a factorisation, as of PyG's performer, rounds by the number of threads."""
    threads = torch.get_num_threads()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(threads)


def graph(*, seed: int = 0, dirty: bool = True, edges: tuple[str, ...] = (), nodes: int = NODES) -> Data:
    """A small directed graph. dirty: with self loops, repeated edges, and nodes without any edge. `edges`: the rows
    that its edges carry."""
    gen = torch.Generator().manual_seed(seed)
    index = torch.randint(0, nodes - 2 * dirty, (2, 4 * nodes), generator=gen)
    if dirty:
        loops = torch.arange(0, nodes - 2, 3).expand(2, -1)
        index = torch.cat([index[:, index[0] != index[1]], loops], 1)  # PyG's norm takes any one of several loops
        index = torch.cat([index, index[:, :5]], 1)
        index = index[:, torch.randperm(index.shape[1], generator=gen)]
    else:
        index = torch.unique(index[:, index[0] != index[1]], dim=1)
        index = index[:, index[1].argsort(stable=True)]
    train = torch.rand(nodes, generator=gen) < 0.6
    data = Data(x=torch.randn(nodes, WIDTH, generator=gen), y=torch.randint(0, CLASSES, (nodes,), generator=gen))
    data.edge_index, data.train_mask, data.val_mask = index, train, ~train
    rows = {
        "edge_weight": torch.rand(index.shape[1], generator=gen) + 0.5,
        "edge_attr": torch.rand(index.shape[1], EDGE_DIM, generator=gen),
        "edge_type": torch.randint(0, TYPES, (index.shape[1],), generator=gen),
    }
    for key in edges:
        data[key] = rows[key]
    return data


def logits_of(out: object) -> Tensor:
    """Of a tuple the first, of a dictionary that under `logits`."""
    first = out[0] if isinstance(out, tuple) else out["logits"] if isinstance(out, dict) else out
    assert isinstance(first, Tensor)
    return first


def plain(make: Callable[[], nn.Module], data: Data, *, epochs: int = EPOCHS) -> Trained:
    """PyG's own loop in fp64, with Adam."""
    net = copy.deepcopy(make().double())  # hooks and shadows must live through a copy, as in any training library
    optimizer = torch.optim.Adam([p for p in net.parameters() if p.requires_grad], lr=LR)
    taken = inspect.signature(net.forward).parameters
    given = {key: data[key] for key in EDGE_KEYS if key in data and key in taken}
    given = {key: rows.double() if rows.is_floating_point() else rows for key, rows in given.items()}
    losses, largest = [], {name: torch.zeros_like(p) for name, p in net.named_parameters()}
    for _ in range(epochs):
        net.train()
        optimizer.zero_grad()
        out = logits_of(net(data.x.double(), data.edge_index, **given))
        loss = F.cross_entropy(out[data.train_mask], data.y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        for name, p in net.named_parameters():
            if p.grad is not None:
                largest[name] = torch.maximum(largest[name], p.grad.abs())
    return Trained(losses, {name: value.detach().clone() for name, value in net.eval().state_dict().items()}, largest)


@cache
def _resolved(strategy: str) -> tuple[dict, dict]:
    given = {"dataset.self_loops": "keep", "dataset.drop_duplicates": False, "comm": "threads", "precision": "fp64"}
    given |= {"epochs": EPOCHS, "optim": {"lr": LR}, "tracker": "jsonl", "strategy": strategy, "dataset": "pt"}
    given |= {"partition": "random", "eval_every": EPOCHS} | STRATEGIES[strategy]
    settings = _settings("gcn", None, given | {"dataset.path": "none.pt"})
    return dict(settings.resolved), dict(settings.names)


def train(target: str, kwargs: Mapping[str, object], data: Data, strategy: str, world: int, **keys: object) -> Trained:
    """As `gnnpar.train` with `model=pyg`, without composing anew. `keys`: of the configuration; `auto`:
    loops and repeated edges by default. ValueError, TrainingFailed."""
    resolved, names = _resolved(strategy)
    model = {"_target_": "gnnpar.models.pyg.model.PyG", "target": target, "kwargs": dict(kwargs), "self_loops": "keep"}
    changed = {"model": model, "dataset": {**resolved["dataset"], "path": str(write_given(data))}, "world_size": world}
    if keys.pop("auto", False):  # the defaults of a PyG model
        changed["dataset"] |= {"self_loops": "auto", "drop_duplicates": "auto"}
        model["self_loops"] = "auto"
    changed |= keys
    quiet = contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO())
    with tempfile.TemporaryDirectory() as folder, quiet[0], quiet[1], warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run: Run = _train(build_settings({**resolved, **changed}, {**names, "model": "pyg"}, ""), Path(folder) / "run")
        net = run.model.model.get_submodule("net")
        return Trained(run.history["loss/train"].tolist(), dict(net.eval().state_dict()))


def verdict(
    target: str, kwargs: Mapping[str, object], data: Data, strategy: str, world: int, due: Trained, **keys: object
) -> Verdict:
    """Is a training equal to `due`, PyG's, or refused in one clear line?"""
    try:
        got = train(target, kwargs, data, strategy, world, **keys)
    except TrainingFailed as error:
        return Verdict("late" if (line := _unclear(str(error))) == "" else "crashed", line or str(error))
    except ValueError as error:
        return Verdict("unclear", line) if (line := _unclear(str(error))) else Verdict("refused", str(error))
    except Exception as error:  # whatever else comes out is a failure of its own kind
        return Verdict("crashed", f"{type(error).__name__}: {str(error)[:300]}")
    pairs = zip(got.losses, due.losses, strict=True)
    if (worst := max(abs(a - b) / max(1.0, abs(b)) for a, b in pairs)) > TOLERANCE:
        return Verdict("wrong", f"losses by {worst:.1e}: {got.losses} for {due.losses}")
    if missing := sorted(due.state.keys() ^ got.state.keys()):
        return Verdict("without", f"state: {missing[:4]}")
    for name, value in due.state.items():
        apart = (got.state[name].double() - value.double()).abs()
        if name in due.largest:
            apart = apart[(due.largest[name] >= ROUNDING) | (due.largest[name] == 0)]
        off = apart.max().item() if apart.numel() else 0.0
        if not off <= TOLERANCE * max(1.0, value.double().abs().max().item() if value.numel() else 0.0):
            return Verdict("wrong", f"losses equal, {name} by {off:.1e}")
    return Verdict("equal")


def _unclear(line: str) -> str:
    """Why a refusal is none; empty: it is one line, names a module or a key, and gives a reason."""
    line = re.sub(r"^rank \d+: (ValueError: )?", "", line)
    if "\n" in line:
        return f"several lines: {line[:300]!r}"
    told = "cannot run on" in line  # and torch's reason after it
    if (_INTERNAL.search(line) and not told) or len(line.split()) < 8 or not _NAMES.search(line):
        return f"no reason of ours: {line[:300]}"
    return ""
