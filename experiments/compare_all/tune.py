"""Tuned rows by equal budget (protocol, rule 14): a random search on validation, the same for every strategy.

    python experiments/compare_all/tune.py strategy=graph_parallel,adaqp model=gcn dataset=sbm epochs=60 --trials 16

Each strategy gets as many trials of as many epochs, over conf/tune/MODEL.yaml and what it has in
conf/tune/strategy/NAME.yaml. Trial 0 is the job as it stands; trial k draws the same lr, dropout and decay for all. The
search is random, not adaptive: no strategy's luck steers it. Trials are trained with a seed that no report uses
(FIRST_SEED on), and nothing of the test set is kept of them: a report trains the chosen overrides again. A line a trial
goes to OUT, the choices with their provenance to its name with .chosen.json. A search that was stopped goes on.
"""

import json
import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import ChoiceSweep, IntervalSweep, RangeSweep

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks
import records
import study

from gnnpar.paths import conf_dir
from gnnpar.settings import ConfigError, closest
from gnnpar.track.console import complain

FIRST_SEED = 1000  # of trials; reports have seeds from 0
Space = dict[str, str]  # key of the configuration -> choice(...), interval(...), tag(log, interval(...)), range(...)


def tuned(job: list[str], *, space: str, trials: int, seed: int, out: Path) -> list[str]:
    """The overrides that were best on validation, to be appended to the job's; none where the job as it stands was.

    space: names of conf/tune, with commas; the strategy's own knobs are added where there are any. out: JSON lines,
    which several jobs may share. ConfigError: the space or the job cannot be; SystemExit: the job does not run.
    """
    if trials < 1:
        raise ConfigError(f"trials={trials} tries nothing; take 1 (the job as it stands) or more")
    job = checked(job)
    keys, known, name = space_of(space, job), records.read(out), " ".join(job)
    out.parent.mkdir(parents=True, exist_ok=True)
    asked = [{"job": name, "seed": seed, "trial": k, "overrides": draw(keys, k, seed)} for k in range(trials)]
    rows = [next((row for row in known if each.items() <= row.items()), None) for each in asked]
    clock, found = blocks.Clock(rows.count(None)), list[dict[str, Any]]()
    for each, row in zip(asked, rows, strict=True):
        found.append(row or each | attempt([*job, *each["overrides"]], FIRST_SEED + seed))
        if row is None:
            if found[0]["error"]:  # the job itself is wrong: nothing of it is kept
                raise SystemExit(found[0]["error"])
            records.append(out, found[-1:])
            best, last = chosen(found), found[-1]
            said = last["error"] or f"val {last['val']:.4f} (best {best['val']:.4f} of trial {best['trial']})"
            clock.tell(f"{' '.join(last['overrides']) or 'as it stands'}: {said}")
    if trials > 1 and all(row["error"] for row in found[1:]):
        raise ConfigError(f"no trial of space {space} ran: {found[1]['error']}")
    freeze(out.with_suffix(".chosen.json"), chosen(found), space=space, keys=keys, found=found)
    return chosen(found)["overrides"]


def attempt(overrides: Sequence[str], seed: int) -> dict[str, Any]:
    """One trial, without what the test set says. A run that fails counts: its settings are no good."""
    began = time.perf_counter()
    try:
        result = blocks.train([*overrides, f"seed={seed}", "checkpoint.keep=0"])["result"]
    except SystemExit as failed:
        lines = str(failed).strip().splitlines()
        return {"val": None, "error": lines[-1] if lines else "failed", "wall_seconds": time.perf_counter() - began}
    if result["metric"]["best_val"] is None:
        raise ConfigError("the dataset has no validation nodes, and nothing else may choose")
    kept = {key: result[key] for key in ("epochs", "epochs_done", "commit", "hardware", "versions", "hashes")}
    at = {"val": result["metric"]["best_val"], "best_epoch": result["metric"]["best_epoch"], "error": None}
    return at | kept | {"train_seed": seed, "wall_seconds": time.perf_counter() - began}


def chosen(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The best on validation, of equal ones the first."""
    return max(rows, key=lambda row: (-math.inf if row["val"] is None else row["val"], -row["trial"]))


def freeze(file: Path, best: Mapping[str, Any], *, space: str, keys: Space, found: Sequence[Mapping[str, Any]]) -> None:
    """The choice in the file of choices, in the place of an earlier one of the same job and seed."""
    rest = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    rest = [entry for entry in rest if (entry["job"], entry["seed"]) != (best["job"], best["seed"])]
    failed = sum(bool(row["error"]) for row in found)
    budget = {"trials": len(found), "epochs": best["epochs"], "failed": failed, "space": space, "keys": keys}
    entry = {**best, "default_val": found[0]["val"], **budget}
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps([*rest, entry], indent=1) + "\n", encoding="utf-8")
    partial.replace(file)


def checked(job: Sequence[str]) -> list[str]:
    """One configuration, without what a search sets itself."""
    parsed = OverridesParser.create().parse_overrides(list(job))
    if swept := next((o for o in parsed if o.is_sweep_override()), None):
        raise ConfigError(f"{swept.input_line}: a search is of one configuration; call it for each")
    return [o for o, each in zip(job, parsed, strict=True) if each.key_or_group not in ("seed", "block")]


def space_of(space: str, job: Sequence[str]) -> Space:
    """The keys of all named files, and of the strategy's own where it has one."""
    strategy = chosen_in("strategy", job) or "graph_parallel"
    names = [name for name in space.split(",") if name]
    own = f"strategy/{strategy}"
    if (conf_dir() / "tune" / f"{own}.yaml").exists() and not any(name.startswith("strategy/") for name in names):
        names.append(own)
    keys: Space = {}
    for name in names:
        for key, text in read_space(name).items():
            if key in keys:
                raise ConfigError(f"{key} is in two of the spaces {', '.join(names)}; take one of them")
            keys[key] = text
    return keys


def read_space(name: str) -> Space:
    """The parameters of conf/tune/NAME.yaml, as Hydra's sweepers read them."""
    folder = conf_dir() / "tune"
    file = folder / f"{name}.yaml"
    if not file.exists():
        there = sorted(f.relative_to(folder).with_suffix("").as_posix() for f in folder.rglob("*.yaml"))
        raise ConfigError(f"space={name} does not exist{closest(name, there)}; there are {', '.join(there)}")
    return {key: str(text) for key, text in yaml.safe_load(file.read_text(encoding="utf-8"))["params"].items()}


def chosen_in(group: str, job: Sequence[str]) -> str | None:
    return next((o.partition("=")[2] for o in reversed(job) if o.startswith(f"{group}=")), None)


def draw(keys: Space, trial: int, seed: int) -> list[str]:
    """Overrides of a trial, none of trial 0. A key's value depends on (seed, key, trial) alone: strategies that share
    keys share values."""
    if trial == 0:
        return []
    parser = OverridesParser.create()
    drawn = []
    for key, text in keys.items():
        value = parser.parse_override(f"{key}={text}").value()
        drawn.append(f"{key}={_drawn(value, random.Random(f'{seed}/{key}/{trial}'), f'{key}: {text}')}")
    return drawn


def _drawn(of: object, rng: random.Random, where: str) -> str:
    if isinstance(of, ChoiceSweep | RangeSweep):
        value = rng.choice(of.list if isinstance(of, ChoiceSweep) else list(of.range()))
        return getattr(value, "text", None) or str(value)
    if not isinstance(of, IntervalSweep):
        raise ConfigError(f"{where} draws nothing; write choice(a, b), interval(a, b) or tag(log, interval(a, b))")
    assert of.start is not None and of.end is not None
    if isinstance(of.start, int) and isinstance(of.end, int):
        return str(rng.randint(of.start, of.end))
    if "log" in of.tags:
        return f"{math.exp(rng.uniform(math.log(of.start), math.log(of.end))):.4g}"
    return f"{rng.uniform(of.start, of.end):.4g}"


def search(*overrides: str, space: str = "", trials: int = 16, seed: int = 0, out: Path = HERE / "tune.jsonl") -> None:
    """Tune overrides of gnnpar train; strategy=A,B: one search each, of equal budget.

    space: names in conf/tune, with commas (the model's). trials: trial 0 is the job as it stands (16). seed: of what is
    drawn; another one is another search (0). out: JSON lines, one a trial.
    """
    space = space or chosen_in("model", overrides) or "gcn"
    rest = [o for o in overrides if not o.startswith("strategy=")]
    for strategy in (chosen_in("strategy", overrides) or "graph_parallel").split(","):
        print(f"{strategy}: {trials} trials of space {space}", flush=True)
        best = tuned([f"strategy={strategy}", *rest], space=space, trials=trials, seed=seed, out=out)
        print(f"{strategy}: {' '.join(best) or 'as it stands'}", flush=True)


def main(argv: Sequence[str]) -> int:
    given = study.options(search, argv)
    try:
        search(*given.pop("overrides"), **given)
    except ConfigError as error:
        complain(str(error))
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
