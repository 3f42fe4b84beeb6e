"""Evaluate exact logits, and compare the strategy's gradient with the exact one. Untimed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from torch import Tensor

from gnnpar.comm import Communicator
from gnnpar.files import JsonDict
from gnnpar.parallel.engine import Engine
from gnnpar.parallel.objective import Objective


def evaluate(engine: Engine, objective: Objective) -> JsonDict:
    """Return `Objective.metrics` of exact logits, equal on every rank. Collective."""
    engine.drain()
    return objective.metrics(engine.predict())


class Overlap(NamedTuple):
    """<a, b>, |a|^2, |b|^2 and |a - b|^2 of two gradients."""

    dot: float = 0.0
    square: float = 0.0
    exact_square: float = 0.0
    difference_square: float = 0.0

    def __add__(self, other: tuple) -> Overlap:  # type: ignore[override]  # sums, unlike tuples
        return Overlap(*(a + b for a, b in zip(self, other, strict=True)))

    @property
    def cosine(self) -> float | None:
        norm = math.sqrt(self.square * self.exact_square)
        return self.dot / norm if norm else None

    @property
    def relative_error(self) -> float | None:
        return math.sqrt(self.difference_square / self.exact_square) if self.exact_square else None


def fidelity(gradient: Mapping[str, Tensor], exact: Mapping[str, Tensor], comm: Communicator) -> JsonDict:
    """Return cosine and relative error, overall and by layer, on rank 0; else {}. Collective.

    Each name counts once: ranks hold different parameters (stages) or the same ones (parts).
    """
    mine = {name: _overlap(gradient[name], exact[name]) for name in exact}
    everyone = comm.gather(mine)
    if everyone is None:
        return {}
    by_name = {name: Overlap(*values) for part in everyone for name, values in part.items()}
    layers: dict[str, Overlap] = {}
    for name, overlap in by_name.items():
        layers[layer_name(name)] = layers.get(layer_name(name), Overlap()) + overlap
    total = Overlap()
    for overlap in by_name.values():
        total = total + overlap
    errors = {name: o.relative_error for name, o in layers.items() if o.relative_error is not None}
    worst = max(errors, key=lambda name: errors[name], default=None)
    return {
        "fidelity/cosine": total.cosine,
        "fidelity/relative_error": total.relative_error,
        "fidelity/worst_layer": worst,
        "fidelity/worst_relative_error": None if worst is None else errors[worst],
        "fidelity/layers": {name: [o.cosine, o.relative_error] for name, o in layers.items()},
    }


def layer_name(parameter: str) -> str:
    """Return 'layers.3' of 'layers.3.linear.weight', else the first component: 'encoder', 'decoder'."""
    parts = parameter.split(".")
    return ".".join(parts[:2]) if parts[0] == "layers" and len(parts) > 1 else parts[0]


def _overlap(gradient: Tensor, exact: Tensor) -> tuple[float, ...]:
    a, b = gradient.double().flatten(), exact.double().flatten()
    return tuple(Overlap((a @ b).item(), (a @ a).item(), (b @ b).item(), (a - b).square().sum().item()))
