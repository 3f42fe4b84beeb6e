"""`gnnpar plan`: choose a strategy for a model, a dataset and a topology, and write plan.json."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack, cast

from gnnpar.config.compose import compose
from gnnpar.config.inputs import as_value, group_of, key_of, sets
from gnnpar.files import JsonObject, require_writable, write_text_atomic
from gnnpar.placement import QUALITIES, Quality
from gnnpar.settings import ConfigError, Settings, closest, config_errors
from gnnpar.track.console import say, show_table

if TYPE_CHECKING:
    from gnnpar.placement import Plan
    from gnnpar.planner.planner import Planned

HELP = """Choose a strategy and its parameters for a model, a dataset and a topology. Prints predicted time and
memory of every candidate, the choice and why, and writes plan.json for `gnnpar train plan=plan.json`. Overrides are
those of `gnnpar train`. The search: search=NAME budget=N seed=N with guided (the default: a tree search with a
trained prior over places, sizes of parts, grids and knobs), tag (TAG's tree), random, or enumerate (uniform grids on
the devices as given); fewer=true allows unused devices."""

NO_MEASURE = "do not measure this machine's speed (20 s, once); use nominal rates unless it was measured"


def run(argv: list[str]) -> int:
    """Find and write a plan. Return 0."""
    parser = ArgumentParser("gnnpar plan", description=HELP)
    parser.add_argument("--quality", default="exact", help=f"allowed classes, of {', '.join(QUALITIES)} (exact)")
    parser.add_argument("--factor", default="", help="epochs a class costs: stale=1.2,quantized=1.05 (1 each)")
    parser.add_argument("--out", default=".", help="folder for plan.json (.)")
    parser.add_argument("--top", type=int, default=8, help="rows of the table (8), and the best of every family")
    parser.add_argument("--measure", type=int, default=0, help="run the so many best predicted, and choose by time (0)")
    parser.add_argument("--no-measure", action="store_true", help=NO_MEASURE)
    parser.add_argument("--trace", help="file for the chosen plan's simulated epoch, as a Chrome trace (Perfetto)")
    parser.add_argument("--json", action="store_true", help="the table as JSON")
    parser.add_argument("overrides", nargs="*", help="model=NAME dataset=NAME topology=NAME world_size=N key=value ...")
    options = parser.parse_intermixed_args(argv)
    allowed = qualities(options.quality)
    overrides, how = search_of(options.overrides)
    how["factors"] = factors_of(options.factor)
    refuse_strategy(overrides)
    if not options.json:
        say(f"gnnpar plan {' '.join(overrides)}: looking for a strategy, nothing is trained")
    settings = compose(overrides)
    refuse_shards(settings, "plan")
    if options.trace:
        require_writable(Path(options.trace))
    from gnnpar.planner import planned as planner

    talk = (lambda _: None) if options.json else say
    planned = searched(settings, overrides, talk, not options.no_measure, allowed=allowed, **how)
    measured: dict[str, float] = {}
    if options.measure:
        planned, measured = by_measuring(planned, settings, options.measure, overrides, talk)
    plan = plan_of(planned, overrides, settings)
    if measured:
        plan = replace(plan, predicted={**(plan.predicted or {}), "measured_seconds": measured})
    file, request = plan.save(Path(options.out)), planned.request
    if options.trace:
        Path(options.trace).parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(Path(options.trace), json.dumps(planner.timeline(planned).chrome_trace()))
    if options.json:
        answer = {"plan": str(file), "search": planned.searched, "candidates": candidates(planned, measured)}
        answer |= {"unpriced": request.registry.unpriced(request.allowed)}
        sys.stdout.write(json.dumps(answer, indent=1) + "\n")
        return 0
    say(f"model: {settings.names.get('model')}, {request.ir.describe()}")
    say(f"graph: {request.workload.dataset.name}, {request.graph.nodes} nodes, {request.graph.edges} edges")
    say(f"topology: {settings.names.get('topology')}, {request.machine.fabric.describe()}")
    show_table(planner.COLUMNS, planner.table_rows(planned.evaluated, options.top, measured))
    for line in planner.why(planned, planner.timeline(planned).seconds):
        say(f"- {line}")
    go = f"gnnpar train {shlex.quote(f'plan={as_value(str(file))}')} world_size={plan.num_ranks}"
    say(f"chosen: {planned.chosen.label}  ->  {file}, its arrays beside it  ({go})")
    return 0


class Searching(TypedDict, total=False):
    """Search arguments of `planner.planned.planned`."""

    factors: Mapping[Quality, float]
    search: str
    budget: int
    fewer: bool


def searched(
    settings: Settings,
    overrides: Sequence[str],
    say: Callable[[str], None],
    measuring: bool = True,
    *,
    allowed: frozenset[Quality],
    **how: Unpack[Searching],
) -> Planned:
    """Return the planner's answer. It chooses `world_size` and `first_layer` unless an override sets them."""
    from gnnpar.planner import planned as planner

    ranks = settings.world_size if sets(overrides, "world_size") else None
    free = not sets(overrides, "first_layer")
    with config_errors():
        found = planner.planned(
            settings, ranks=ranks, allowed=allowed, say=say, recompute=free, measuring=measuring, **how
        )
        return planner.with_one_device(found, settings, say, measuring=measuring)


def plan_of(planned: Planned, overrides: Sequence[str], settings: Settings) -> Plan:
    """Return the chosen plan, with the YAML that its strategy has under these overrides."""
    from gnnpar.planner import planned as planner

    def yaml_of(name: str) -> JsonObject:
        return compose([*overrides, f"strategy={name}"]).resolved["strategy"]

    with config_errors(planned.chosen.label):  # for example, the chosen strategy does not take the codec
        return planner.plan_of(planned, yaml_of, settings)


def candidates(planned: Planned, measured: Mapping[str, float] = {}) -> list[JsonObject]:
    """Return every candidate, best first, as JSON. measured: label -> seconds per epoch."""
    return [
        each.as_predicted()
        | {
            "refused": each.refused,
            "not_recommended": each.discouraged,
            "objective": None if each.price.unpriced else each.objective,
            "measured": measured.get(each.candidate.label),
        }
        for each in planned.evaluated
    ]


def by_measuring(
    planned: Planned, settings: Settings, count: int, overrides: Sequence[str], say: Callable[[str], None]
) -> tuple[Planned, dict[str, float]]:
    """Launch `count` plans. Return the answer with the fastest first, and label -> measured seconds per epoch."""
    from gnnpar.planner import halving

    ranks = planned.chosen.candidate.ranks
    if count < 2:
        raise ConfigError(f"--measure={count} compares nothing; measure 2 plans or more")
    if planned.request.fewer:
        raise ConfigError(f"--measure={count} launches plans of one number of ranks; leave fewer=true out")
    with config_errors():
        halving.check(settings, ranks, count)
        launch = halving.launcher(overrides, ranks)
        return halving.halved(
            planned, count, lambda e: plan_of(replace(planned, evaluated=(e,)), overrides, settings), launch, say
        )


_BASELINES = ("anneal", "descent", "mcts", "refine")


def search_of(overrides: Sequence[str]) -> tuple[list[str], Searching]:
    """Return the other overrides, and search=NAME budget=N fewer=true as arguments of planned()."""
    from gnnpar.planner.search.named import BUDGET, DEFAULT, names

    asked = {"search": DEFAULT, "budget": str(BUDGET), "fewer": "false"}
    rest = [o for o in overrides if not sets([o], *asked)]
    asked |= {key_of(o): o.partition("=")[2] for o in overrides if o not in rest}
    name, budget, fewer = asked.values()
    if name not in (known := names()):
        if name in _BASELINES:
            raise ConfigError(f"search={name} is in experiments/planner_search now: {DEFAULT} finds better plans")
        raise ConfigError(f"search={name} is no search{closest(name, known)}; there are {', '.join(known)}")
    if not budget.isdecimal() or int(budget) < 1:
        raise ConfigError(f"budget={budget} must be a whole number of evaluations >= 1")
    if fewer not in ("true", "false"):
        raise ConfigError(f"fewer={fewer} must be true or false")
    return rest, {"search": name, "budget": int(budget), "fewer": fewer == "true"}


def qualities(text: str) -> frozenset[Quality]:
    """Parse 'exact,stale'; exact is always allowed."""
    chosen = [word for word in text.split(",") if word]
    for word in chosen:
        if word not in QUALITIES:
            raise ConfigError(
                f"--quality={word} is no class{closest(word, QUALITIES)}; there are {', '.join(QUALITIES)}"
            )
    return frozenset(cast("Quality", word) for word in (*chosen, "exact"))


def factors_of(text: str) -> dict[Quality, float]:
    """Parse 'stale=1.2,quantized=1.05': class -> number >= 1."""
    factors: dict[Quality, float] = {}
    for word in filter(None, text.split(",")):
        name, _, value = word.partition("=")
        try:
            number = float(value)
        except ValueError:
            number = 0.0
        if name not in QUALITIES or not 1.0 <= number < float("inf"):
            raise ConfigError(f"--factor={word} must be a class ({', '.join(QUALITIES)}) = a number >= 1")
        factors[cast("Quality", name)] = number
    return factors


def refuse_shards(settings: Settings, command: str) -> None:
    if (folder := settings.shards.folder) is not None:
        raise ConfigError(f"shards={folder}: gnnpar {command} reads the whole graph; name its dataset instead")


def refuse_strategy(overrides: Sequence[str]) -> None:
    """Raise ConfigError for overrides of the strategy, which the planner chooses."""
    for asked in overrides:
        if group_of(asked) in ("strategy", "plan"):
            raise ConfigError(f"{asked}: gnnpar plan chooses the strategy; leave it out, or use gnnpar train")
