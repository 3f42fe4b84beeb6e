"""What combines with what, and how losses run: measured by the functions of the conformance suite for all of conf/."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import torch

from gnnpar.config.compose import compose
from gnnpar.data.dataset import Dataset
from gnnpar.parallel.single.strategy import Single
from gnnpar.paths import conf_dir
from gnnpar.training.optim import Adam
from gnnpar.verify.conformance import TOLERANCE, check, relative_error, small_graph, train_in_threads

WORLD = 3
PROBE = "gcn"  # the model of the tables that have another axis
EPOCHS, RATE = 21, 0.03

torch.set_num_threads(1)  # ranks are threads here, and OpenMP's beside them spin for cores that are not there


def names(group: str) -> list[str]:
    """Every YAML of a group; model=pyg is no model before it has a target."""
    found = {file.stem for file in (conf_dir() / group).glob("*.yaml")}
    return sorted(found - {"pyg"} if group == "model" else found)


@cache
def chosen(group: str, name: str, *overrides: str) -> Any:
    return getattr(compose([f"{group}={name}", *overrides]), group)


def model_of(name: str) -> Any:
    return chosen("model", name, "model.hidden=8", "model.num_layers=3")


def table(corner: str, columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [[corner, *columns], ["---"] * (len(columns) + 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + "\n"


def world_of(strategy: Any) -> int:
    return min(WORLD, strategy.capabilities.max_ranks or WORLD)


def attempt(run: Callable[[], float]) -> str:
    """An error in words, or why it does not run."""
    try:
        error = run()
    except Exception as refused:  # a combination that is refused says so in one line
        text = " ".join(str(refused).split()).replace("|", "/")
        return f"no: {text.removeprefix('rank 0: ')[:90]}"
    return "exact" if error <= TOLERANCE else f"{error:.0e}"


def gradient_error(strategy: Any, model: Any, **options: Any) -> float:
    """Worst relative error of a gradient in the first epoch, against the single device."""
    mine = gradients(strategy, model, **options)
    return max(relative_error(mine.get(key), expected) for key, expected in of_single(model).items())


def gradients(strategy: Any, model: Any, **options: Any) -> Mapping[str, torch.Tensor]:
    run = train_in_threads(strategy, model, small_graph(), world=world_of(strategy), epochs=1, **options)
    return run.gradients[0]


@cache
def of_single(model: Any) -> Mapping[str, torch.Tensor]:
    return gradients(Single(), model)


def models_table(strategies: Sequence[str], models: Sequence[str]) -> str:
    """The suite's verdict on every strategy in its exact limit with every model."""
    rows = []
    for name in strategies:
        strategy = chosen("strategy", name)
        rows.append([f"`{name}`", *(_verdict(strategy, model) for model in models)])
    return table("strategy", [f"`{model}`" for model in models], rows)


def _verdict(strategy: Any, model: str) -> str:
    try:
        cases = check(strategy, {model: model_of(model)}, worlds=(world_of(strategy),))
    except ValueError:
        return "refused"
    if not all(case.passed for case in cases):
        return "**fails**"
    worst = max(max(case.loss_error, case.worst_gradient_error, case.logits_error) for case in cases)
    return f"{worst:.0e}"


def codecs_table(strategies: Sequence[str], codecs: Sequence[str]) -> str:
    """Strategies that have a codec, with every codec; those with chunks in one, where nothing is stale."""
    model, rows = model_of(PROBE), []
    for name in strategies:
        strategy = chosen("strategy", name)
        fields = {f.name for f in dataclasses.fields(strategy)}
        has = "codec" in fields
        strategy = dataclasses.replace(strategy, chunks="one") if has and "chunks" in fields else strategy
        cells = ["-"] * len(codecs)
        if has:
            cells = [_with(strategy, model, codec=chosen("codec", codec)) for codec in codecs]
        rows.append([f"`{name}`", *cells])
    return table("strategy", [f"`{codec}`" for codec in codecs], rows)


def _with(strategy: Any, model: Any, **fields: Any) -> str:
    return attempt(lambda: gradient_error(dataclasses.replace(strategy, **fields), model))


def overlaps_table(strategies: Sequence[str]) -> str:
    """What overlaps a strategy has, in its exact limit, and whether a first layer can be cached."""
    model, rows = model_of(PROBE), []
    for name in strategies:
        strategy = chosen("strategy", name).exact_limit()
        hint = typing.get_type_hints(type(strategy)).get("overlap")
        found = [f"`{o}`: {_with(strategy, model, overlap=o)}" for o in typing.get_args(hint)]
        cached = attempt(lambda s=strategy: gradient_error(s, model, first_layer="cached"))
        ranks = str(strategy.capabilities.max_ranks or "any")
        exactness = ", ".join(sorted(chosen("strategy", name).exactness))
        rows.append([f"`{name}`", exactness, ranks, "; ".join(found) or "-", cached])
    return table("strategy", ["as it comes", "ranks", "`overlap`", "`first_layer=cached`"], rows)


def composability() -> str:
    """The page."""
    strategies = names("strategy")
    return f"""# What combines with what

Made when this site was built: every cell is a run of the conformance suite's own functions on its small graph (60
nodes, loops, repeated edges, isolated nodes), in fp64, dropout on, ranks as threads. Nothing here is typed by hand; a
YAML of yours in `conf/` gets its row.

## Strategies and models

Each strategy in its exact limit against the single device, on {WORLD} ranks, two epochs: the worst relative difference
in loss, any gradient and logits. The suite allows {TOLERANCE:.0e}, and runs 1 to 4 ranks.

{models_table(strategies, names("model"))}

## Strategies and codecs

Relative error of the worst gradient in the first epoch, `model={PROBE}`, {WORLD} ranks; `exact` is below
{TOLERANCE:.0e}, a dash is a strategy without a codec. Pipelines and hybrids with one chunk, where nothing is stale.

{codecs_table(strategies, names("codec"))}

## Strategies, overlaps, ranks

Overlaps and the cached first layer in the exact limit, the same measure. What a strategy is as it comes follows from
its codec and its schedule.

{overlaps_table(strategies)}
"""


def losses_of(strategy: Any, model: str, data: Dataset) -> list[float]:
    """Of every epoch, by a training that learns: the loss of random guesses is 2.08."""
    config = chosen("model", model, "model.hidden=16", "model.num_layers=3", "model.dropout=0.1")
    world = world_of(strategy)
    return train_in_threads(strategy, config, data, world=world, epochs=EPOCHS, optim=Adam(lr=RATE)).losses


def convergence() -> str:
    """The page: losses of every strategy as it comes, and how far they are from the single device's."""
    data = chosen("dataset", "sbm", "dataset.num_nodes=400").load(None, 0)
    parts = [
        f"""# Losses against the single device

Made when this site was built: `sbm` with 400 nodes, 3 layers of 16, Adam in fp64 ({EPOCHS} epochs, rate {RATE}), equal
weights and masks, each strategy as it comes (not in its exact limit) on {WORLD} ranks, as threads. The last column is
the largest relative difference to the single device in any epoch: rounding for exact strategies, and their own way for
the others. This shows whether training follows the same path, and nothing of accuracy: see
[the experiments](experiments/README.md).
"""
    ]
    shown = [*range(0, EPOCHS, 5)]
    for model in (PROBE, "gat"):
        rows, exact = [], losses_of(Single(), model, data)
        for name in names("strategy"):
            found = losses_of(chosen("strategy", name), model, data)
            gap = max(abs(mine / theirs - 1) for mine, theirs in zip(found, exact, strict=True))
            rows.append([f"`{name}`", *(f"{found[epoch]:.4f}" for epoch in shown), f"{gap:.0e}"])
        columns = [*(f"epoch {epoch}" for epoch in shown), "from `single`"]
        parts.append(f"## {model}\n\n" + table("strategy", columns, rows))
    return "\n".join(parts)
