"""Evaluate exact logits, and compare the strategy's gradient with the exact one, outside of timed epochs."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.files import JsonDict
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.objective import Objective


def evaluate(engine: Engine, objective: Objective) -> JsonDict:
    """Return `Objective.metrics` of exact logits, equal on every rank. Collective."""
    engine.drain()
    return objective.metrics(engine.predict())


def fidelity(gradient: Mapping[str, Tensor], exact: Mapping[str, Tensor], comm: Communicator) -> JsonDict:
    """Return cosine and relative error, overall and by layer, on rank 0; else {}. Collective. Each name counts once,
    whether ranks hold different parameters (stages) or the same ones (parts)."""
    mine = {name: _overlap(gradient[name], exact[name]) for name in exact}
    everyone = comm.gather(mine)
    if everyone is None:
        return {}
    by_name = {name: overlap for part in everyone for name, overlap in part.items()}
    layers: dict[str, Tensor] = {}
    for name, overlap in by_name.items():
        layer = layer_name(name)
        layers[layer] = layers[layer] + overlap if layer in layers else overlap
    cosine, relative_error = _agreement(sum(by_name.values(), torch.zeros(4, dtype=torch.float64)))
    found = {name: _agreement(overlap) for name, overlap in layers.items()}
    errors = {name: error for name, (_, error) in found.items() if error is not None}
    worst = max(errors, key=lambda name: errors[name], default=None)
    return {
        "fidelity/cosine": cosine,
        "fidelity/relative_error": relative_error,
        "fidelity/worst_layer": worst,
        "fidelity/worst_relative_error": None if worst is None else errors[worst],
        "fidelity/layers": {name: list(pair) for name, pair in found.items()},
    }


def layer_name(parameter: str) -> str:
    """Return 'layers.3' of 'layers.3.linear.weight', else the first component: 'encoder', 'decoder'."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" and len(parts) > 1 else parts[0]


def _overlap(gradient: Tensor, exact: Tensor) -> Tensor:
    """Return <a, b>, |a|^2, |b|^2 and |a - b|^2 on the CPU, [4] float64."""
    a, b = gradient.double().flatten(), exact.double().flatten()
    return torch.stack([a @ b, a @ a, b @ b, (a - b).square().sum()]).cpu()


def _agreement(overlap: Tensor) -> tuple[float | None, float | None]:
    """Return cosine and relative error; None for a zero gradient."""
    dot, square, exact, difference = overlap.tolist()
    norm = math.sqrt(square * exact)
    return dot / norm if norm else None, math.sqrt(difference / exact) if exact else None
