"""Whatever training launches is compiled ahead of time: types of tensors, flags and absent tensors, but not sizes.

Trained on interpreted kernels, every strategy equals the specification."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpretedFunction

from composing import configured, names
from gnnpar.verify.conformance import relative_error, small_graph, train_in_threads
from gnnpar_kernels.triton_tuning import interpreting
from interpreter import patch_once_a_launch

sys.path.insert(0, str(Path(__file__).parents[2] / "kernels"))

from bench.ahead import variants
from engines import Rank, on_ranks
from gnnpar.comm import ThreadWorld
from gnnpar.data.dataset import Dataset
from gnnpar.parallel.local import KeyTable
from gnnpar.verify.conformance import Job, graph_for, make_job
from gnnpar_kernels import triton_tasks
from graphs import of_edges

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.int64: "*i64", torch.int32: "*i32"}
TYPES |= {torch.uint8: "*u8", torch.int8: "*i8"}
Launch = tuple[str, str, tuple[tuple[str, object], ...]]
"""(module, kernel, what each argument is)."""

RUNS = [  # strategy, ranks, overrides of the strategy, model, overrides of the model
    ("single", 1, "", "gat", "model.attention_dropout=0.2"),
    ("graph_parallel", 2, "codec=uniform", "gcn", ""),
    ("sar", 2, "", "gat", ""),
    ("sar", 2, "", "gatv2", ""),
    ("graph_parallel", 2, "", "sage_max", ""),
    ("single", 1, "", "gatv2", "model.attention_dropout=0.2"),
    ("single", 1, "", "transformer", "model.attention_dropout=0.2"),
    ("sar", 2, "", "transformer", ""),
    ("single", 1, "", "gcn", ""),
    ("single", 1, "", "sage_max", ""),
    ("single", 1, "", "rgcn", ""),
    ("single", 1, "", "gine", ""),
    ("graph_parallel", 2, "", "gat", "model.attention_dropout=0.2"),
    ("graph_parallel", 2, "codec=random", "gat", ""),
    ("graph_parallel", 2, "strategy.overlap=central_marginal", "gcn", ""),
    ("adaqp", 2, "", "gat", ""),
    ("sar", 2, "", "gcn", ""),
    ("sar", 2, "strategy.backward=pull", "gat", "model.attention_dropout=0.2"),
    ("sar", 2, "", "sage_max", ""),
    ("cagnet", 2, "", "gcn", ""),
    ("gnnpipe", 2, "strategy.chunks=4", "gat", ""),
    ("gnnpipe", 2, "strategy.chunks=4", "sage_max", ""),
    ("pipegcn", 2, "", "gcn", ""),
    ("feature", 2, "", "gat", ""),
    ("cofree", 2, "", "gcn", ""),
    ("minibatch", 2, "strategy.batch_size=16", "gcn", ""),
]
QUICK = 5


def _cases() -> Iterator[Any]:
    for number, run in enumerate(RUNS):
        for precision in (torch.float32, torch.bfloat16):
            quick = number < QUICK and (precision == torch.float32) == (number % 2 == 0)
            yield pytest.param(*run, precision, marks=() if quick else pytest.mark.slow)


@cache
def _compiled() -> frozenset[Launch]:
    return frozenset(
        _named(each.kernel, {n: each.types.get(n) or _kind(n, each.constants[n]) for n in each.kernel.arg_names})
        for each in variants()
    )


def _named(kernel: Any, kinds: dict[str, object]) -> Launch:
    numbers = {name: "number" if kind in ("i32", "i64", "fp32") else kind for name, kind in kinds.items()}
    return kernel.fn.__module__.removeprefix("gnnpar_kernels."), kernel.__name__, tuple(numbers.items())


def _kind(name: str, value: object) -> object:
    """What makes another kernel of an argument, its size apart."""
    if isinstance(value, torch.Tensor):
        return TYPES[value.dtype]
    if value is None or isinstance(value, bool) or name == "BOUND":
        return value
    if name == "SCALE":
        return "dropout" if value else "no dropout"
    return str(value) if isinstance(value, tl.dtype) else "number"


def _graph() -> Dataset:
    """With a row of every class of length: two of 25 edges and more, which are cut."""
    data = small_graph(num_nodes=30, num_edges=120)
    ends = torch.stack([torch.arange(25), torch.full((25,), 3)])
    edges = torch.cat([data.edge_index, ends, ends.flip(0)], dim=1)
    edges = edges[:, torch.argsort(edges[1] * data.num_nodes + edges[0], stable=True)]
    return of_edges(data, edges)


@pytest.mark.quick(2)
@pytest.mark.skipif(not interpreting(), reason="launches are seen in the interpreter")
@pytest.mark.parametrize(("strategy", "world", "options", "model", "settings", "precision"), list(_cases()))
def test_what_is_launched_is_compiled_ahead_of_time(monkeypatch, strategy, world, options, model, settings, precision):
    launched = _noted(monkeypatch)
    ThreadWorld(world).run(_job(strategy, world, options, model, settings, precision))
    _assert_compiled(launched)


@pytest.mark.quick(2)
@pytest.mark.skipif(not interpreting(), reason="launches are seen in the interpreter")
@pytest.mark.parametrize("precision", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("model", ["gat", "gatv2", "transformer"])
def test_so_is_what_a_captured_epoch_launches(monkeypatch, model, precision):
    """Its keys are tensors."""
    job = _job("graph_parallel", 2, "", model, "model.attention_dropout=0.2", precision)
    launched = _noted(monkeypatch)

    def launch(rank: Rank) -> None:
        rank.engine.launch_epoch(0, _NoStep(), KeyTable(0, rank.shard.x.device))

    on_ranks(job, launch)
    _assert_compiled(launched)
    keyed = [dict(arguments) for _, _, arguments in launched if dict(arguments).get("k0") == "*i32"]
    assert len(keyed) >= 3, "a fold, and its gradients by both sides"


class _NoStep:
    refused = False

    def zero_grad(self) -> None: ...
    def step(self, norm: float | None = None) -> None: ...


def _job(strategy: str, world: int, options: str, model: str, settings: str, precision: torch.dtype) -> Job:
    method = configured("strategy", strategy, *options.split())
    config = configured("model", model, "model.hidden=8", *settings.split())
    return make_job(method, config, graph_for(method, config, _graph()), world=world, dtype=precision)


def _noted(monkeypatch: pytest.MonkeyPatch) -> set[Launch]:
    """Fills while kernels are launched, interpreted."""
    launched: set[Launch] = set()
    run = InterpretedFunction.run

    def noted(self, *args, grid, warmup, **kwargs):
        given = dict(zip(self.arg_names, args, strict=False)) | kwargs
        launched.add(_named(self, {name: _kind(name, given[name]) for name in self.arg_names}))
        return run(self, *args, grid=grid, warmup=warmup, **kwargs)

    monkeypatch.setattr(InterpretedFunction, "run", noted)
    monkeypatch.setattr(triton_tasks, "SPLIT", 8)
    monkeypatch.setenv("GNNPAR_KERNELS", "triton")
    patch_once_a_launch()
    return launched


def _assert_compiled(launched: set[Launch]) -> None:
    assert launched
    missing = [
        f"{module} {kernel}: {dict(arguments)}" for module, kernel, arguments in sorted(launched - _compiled(), key=str)
    ]
    assert not missing, "\n".join(missing)


CALLING = ("graph_parallel", "sar", "gnnpipe")  # the views that call kernels; the others are made of them
STRATEGIES = [s if s in CALLING else pytest.param(s, marks=pytest.mark.slow) for s in names("strategy")]
MODELS = {
    "gcn": (),
    "sage_max": (),
    "gat": ("model.heads=2", "model.attention_dropout=0.3"),
}


@pytest.mark.quick(3)
@pytest.mark.skipif(not interpreting(), reason="kernels are compiled here: tests/kernels -m gpu tests them")
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_training_on_triton_kernels_equals_the_specification(monkeypatch, strategy, model):
    limit = configured("strategy", strategy).exact_limit()
    config = configured("model", model, "model.hidden=8", "model.num_layers=2", *MODELS[model])
    data, world = small_graph(num_nodes=30, num_edges=150), min(limit.capabilities.max_ranks or 2, 2)
    patch_once_a_launch()
    runs = {}
    for body in ("triton", "naive"):
        monkeypatch.setenv("GNNPAR_KERNELS", body)
        runs[body] = train_in_threads(limit, config, data, world=world)
    assert runs["triton"].losses == pytest.approx(runs["naive"].losses, rel=1e-10)
    for mine, theirs in zip(runs["triton"].gradients, runs["naive"].gradients, strict=True):
        assert max(relative_error(mine[k], g) for k, g in theirs.items()) < 1e-9
    assert relative_error(runs["triton"].logits, runs["naive"].logits) < 1e-9
    assert torch.isfinite(runs["triton"].logits).all()
