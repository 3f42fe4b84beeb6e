"""`gnnpar estimate`: predict time, bytes and memory of a run, for every strategy or one as configured."""

from __future__ import annotations

import json
import sys
from argparse import ArgumentParser
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gnnpar.cli.plan import NO_MEASURE, refuse_shards
from gnnpar.config.compose import compose
from gnnpar.config.inputs import group_of, key_of, sets
from gnnpar.pricing.topology import Machines
from gnnpar.settings import ConfigError, config_errors
from gnnpar.track.console import say, show_table

if TYPE_CHECKING:
    from gnnpar.planner.estimate import Estimate, Estimator
    from gnnpar.planner.registry import Registry

HELP = """Predict a run of `gnnpar train` with these overrides, without training: epoch time, bytes sent per epoch,
peak memory of the largest rank, and whether it fits. Without a strategy, a row for each one; with strategy=NAME (or
any strategy.KEY=VALUE), this run as configured, with its time, bytes and memory in parts. topology=NAME: for other
machines, as in `gnnpar plan`. Overrides are those of `gnnpar train`."""

ROUNDED = "codec=bf16"


def run(argv: list[str]) -> int:
    """Print the table. Return 0, even if no row fits."""
    parser = ArgumentParser("gnnpar estimate", description=HELP)
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("--no-measure", action="store_true", help=NO_MEASURE)
    parser.add_argument("overrides", nargs="*", help="model=NAME dataset=NAME world_size=N strategy=NAME key=value ...")
    options = parser.parse_intermixed_args(argv)
    refuse(options.overrides)
    one = any(map(sets_strategy, options.overrides))
    if not options.json:
        what = "one run" if one else "every strategy"
        say(f"gnnpar estimate {' '.join(options.overrides)}: {what}, nothing is trained")
    settings = compose(options.overrides)
    refuse_shards(settings, "estimate")
    import torch

    from gnnpar.planner.estimate import COLUMNS, Estimate, Estimator, details, row_of, why
    from gnnpar.planner.registry import registry

    asked = sets(options.overrides, "world_size")
    with config_errors():
        estimator = Estimator(
            settings,
            settings.world_size if asked else None,
            (lambda _: None) if options.json else say,
            measuring=not options.no_measure,
        )
        given = [o for o in options.overrides if sets_codec(o) or sets_strategy(o)]
        title = " ".join([settings.names.get("strategy", "?"), *(o for o in given if not o.startswith("strategy="))])
        runs = [(title, options.overrides)] if one else rows(options.overrides, registry())
        estimates = [estimated(estimator, name, overrides) for name, overrides in runs]
        if not one and not any(map(sets_codec, options.overrides)):
            estimates = [e for e in estimates if not (e.refused and e.name.endswith(ROUNDED))]
        estimates += [] if one else [Estimate(name=name, refused=why) for name, why in registry().broken.items()]
    if one and estimates[0].refused:
        raise ConfigError(estimates[0].refused)
    if options.json:
        sys.stdout.write(json.dumps({"estimates": [e.as_json() for e in estimates]}, indent=1) + "\n")
        return 0
    request = estimator.request(estimates[0].ranks if one else estimator.count)
    data, machine = request.workload.dataset, request.machine
    say(f"model: {settings.names.get('model')}, {request.ir.describe()}")
    say(f"graph: {data.name}, {data.num_nodes} nodes, {data.num_edges} edges")
    say(f"topology: {settings.names.get('topology')}, {machine.fabric.describe()}")
    show_table(COLUMNS, [row_of(e) for e in estimates])
    cuda = settings.device == "cuda" or (settings.device == "auto" and torch.cuda.is_available())
    unknown = cuda and not isinstance(settings.topology, Machines)  # rates of a GPU
    for line in [*(details(estimates[0]) if one else ()), *why(estimates, machine, on_gpu=unknown)]:
        say(f"- {line}")
    return 0


def estimated(estimator: Estimator, name: str, overrides: Sequence[str]) -> Estimate:
    """Return the estimate of one row; `refused` says why a strategy does not fit the other overrides."""
    from gnnpar.planner.estimate import Estimate

    try:
        settings = compose(overrides)
    except ConfigError as error:
        return Estimate(name=name, ranks=estimator.count, refused=str(error))
    return estimator.estimate(settings, name)


def rows(overrides: Sequence[str], registry: Registry) -> list[tuple[str, list[str]]]:
    """Return (name, overrides) per row: each strategy, also with the requested codec or bf16 if it takes codec=."""
    codec = [o for o in overrides if sets_codec(o)]
    rest = [o for o in overrides if o not in codec]
    other = codec or [ROUNDED]
    runs = []
    for name in registry.strategies:
        runs.append((name, [*rest, f"strategy={name}", "codec=identity"]))
        if name in registry.with_codec:
            runs.append((" ".join([name, *other]), [*rest, f"strategy={name}", *other]))
    return runs


def sets_strategy(override: str) -> bool:
    return group_of(override) == "strategy" or key_of(override).startswith("codec@strategy")


def sets_codec(override: str) -> bool:
    return key_of(override).partition(".")[0] == "codec"


def refuse(overrides: Sequence[str]) -> None:
    """Raise ConfigError for plan=, which has its own prediction, and for sweeps."""
    for asked in overrides:
        if sets([asked], "plan"):
            raise ConfigError(f"{asked}: gnnpar plan has priced it (predicted in the file); leave plan= out")
        if asked in ("-m", "--multirun") or (sets([asked], "strategy") and "," in asked):
            raise ConfigError(f"{asked}: gnnpar estimate takes one strategy, or none for all of them")
