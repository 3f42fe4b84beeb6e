"""The runs whose losses are recorded in tests/golden: what they are, and how they are read and written.

NAME-MODEL.txt: 10 epochs of every model on the largest world a strategy uses here. NAME.json: 6 epochs of a GCN on 1, 2
and 4 ranks, quantized strategies too. Matrix products differ in the last bits between processors, so files are compared
to a relative 1e-11, of quantized strategies to 1e-9; a test that runs twice on one machine compares bits.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
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

FOLDER = Path(__file__).parent / "golden"
WORLDS = (1, 2, 4)
LONG, SHORT = 10, 6


@cache
def is_quantized(strategy: str) -> bool:
    return "quantized" in configured("strategy", strategy).exactness


STRATEGIES = [s for s in names("strategy") if s != "tag"]  # tag has the losses of what it chooses


def pairs() -> list[tuple[str, str]]:
    """(strategy, model) of the long runs. A rounding that falls the other way changes a quantized run for good: more
    epochs of those repeat on one machine only."""
    return [(s, m) for s in STRATEGIES if not is_quantized(s) for m in names("model") if (s, m) not in REFUSED]


def _method(strategy: str) -> Any:
    own = ("strategy.sampler=own",) if strategy == "minibatch" else ()  # another sampler draws other neighbours
    return configured("strategy", strategy, *own)


def losses(strategy: str, model: str, device: torch.device = CPU) -> list[float]:
    """Of 10 epochs, ranks on a device."""
    method = _method(strategy)
    config = configured("model", model, "model.hidden=8")
    most = 2 if _cuts_nodes(method) else 3  # two layers are two stages
    world = method.capabilities.max_ranks or most
    return train_in_threads(method, config, small_graph(), world=world, epochs=LONG, device=device).losses


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


def worlds_of(strategy: str) -> list[int]:
    """Those it runs on."""
    method, config = _job(strategy)
    return [w for w in WORLDS if runs_on(method, w, config, epochs=SHORT)]


def short_losses(strategy: str, world: int, device: torch.device = CPU) -> list[float]:
    """Of 6 epochs."""
    method, config = _job(strategy)
    return list(train_in_threads(method, config, small_graph(), world=world, epochs=SHORT, device=device).losses)


def tolerance(strategy: str) -> float:
    """Relative, across machines."""
    return 1e-9 if is_quantized(strategy) else 1e-11


def recorded(strategy: str) -> dict[str, list[float]]:
    """World size -> losses."""
    return json.loads((FOLDER / f"{strategy}.json").read_text(encoding="utf-8"))["losses"]


def write_json(strategy: str, found: dict[int, Sequence[float]]) -> None:
    told = {
        "model": f"gcn, {_job(strategy)[1].num_layers} layers, hidden 8",
        "graph": "small_graph()",
        "precision": "fp64",
    }
    told |= {"relative_tolerance": tolerance(strategy), "losses": {str(w): list(found[w]) for w in found}}
    (FOLDER / f"{strategy}.json").write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")
