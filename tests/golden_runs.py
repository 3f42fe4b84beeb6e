"""The runs whose losses tests/golden/losses.json records, and how the file is read and written.

A run is a strategy and a case. Case MODEL: 10 epochs of that model on the largest world the strategy uses here. Case 1,
2 or 4: 6 epochs of a GCN on so many ranks. Matrix products differ in the last bits between processors, so losses are
compared to a relative 1e-11, of quantized strategies to 1e-9; a test that runs twice on one machine compares bits.
"""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch

from composing import REFUSED, configured, names
from gnnpar.codecs.adaptive.codec import Adaptive
from gnnpar.models.gcn import GCN
from gnnpar.parallel.halo.adaqp import AdaQP
from gnnpar.parallel.strategy import Strategy
from gnnpar.verify.conformance import CPU, runs_on, small_graph, train_in_threads

FILE = Path(__file__).parent / "golden" / "losses.json"
WORLDS = (1, 2, 4)
LONG, SHORT = 10, 6
Losses = dict[str, dict[str, list[float]]]


@cache
def is_quantized(strategy: str) -> bool:
    return "quantized" in configured("strategy", strategy).exactness


STRATEGIES = [s for s in names("strategy") if s != "tag"]  # tag has the losses of the strategy it chooses


def runs() -> list[tuple[str, str]]:
    """(strategy, case) of every run. A quantized strategy has no case of 10 epochs: a rounding that falls the other way
    on another machine changes the rest of the run."""
    found = []
    for strategy in STRATEGIES:
        models = [] if is_quantized(strategy) else [m for m in names("model") if (strategy, m) not in REFUSED]
        found += [(strategy, case) for case in [*worlds_of(strategy), *models]]
    return found


def _method(strategy: str) -> Any:
    own = ("strategy.sampler=own",) if strategy == "minibatch" else ()  # another sampler draws other neighbours
    return configured("strategy", strategy, *own)


def losses(strategy: str, case: str, device: torch.device = CPU) -> list[float]:
    """Return the losses of a run by epoch, ranks on a device."""
    if case.isdigit():
        method, config = _job(strategy)
        world, epochs = int(case), SHORT
    else:
        method, config = _method(strategy), configured("model", case, "model.hidden=8")
        most = 2 if _cuts_nodes(method) else 3  # two layers are two stages
        world, epochs = method.capabilities.max_ranks or most, LONG
    return list(train_in_threads(method, config, small_graph(), world=world, epochs=epochs, device=device).losses)


def _cuts_nodes(method: Strategy) -> bool:
    """Into chunks or batches: these keep no first layer."""
    return not method.capabilities.cached_first_layer


@cache
def _job(strategy: str) -> tuple[Any, Any]:
    """(strategy, model) of the short runs: adaptive codecs choose their bits twice in them."""
    method = _method(strategy)
    if isinstance(method, AdaQP) and isinstance(method.codec, Adaptive):
        method = replace(method, codec=replace(method.codec, period=2, warmup=1, trace_epochs=2))
    return method, GCN(hidden=8, num_layers=4 if _cuts_nodes(method) else 2)  # four stages


def worlds_of(strategy: str) -> list[str]:
    """Return the cases of short runs: sizes of worlds that a strategy runs on."""
    method, config = _job(strategy)
    return [str(w) for w in WORLDS if runs_on(method, w, config, epochs=SHORT)]


def tolerance(strategy: str) -> float:
    """Relative, across machines."""
    return 1e-9 if is_quantized(strategy) else 1e-11


@cache
def recorded() -> Losses:
    """Return strategy -> case -> losses by epoch."""
    return json.loads(FILE.read_text(encoding="utf-8"))


def write(found: Losses) -> None:
    """Write all losses, a run a line."""
    parts = []
    for strategy in sorted(found):
        lines = (f"  {json.dumps(case)}: {json.dumps(values)}" for case, values in found[strategy].items())
        parts.append(f" {json.dumps(strategy)}: {{\n" + ",\n".join(lines) + "\n }")
    FILE.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
