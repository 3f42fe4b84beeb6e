"""`gnnpar ablate study.yaml`: what each factor of a study does, as differences to its base with intervals.

Time ratios are formed inside blocks, one a block (protocol, rule 5); bytes, memory and accuracy are paired by seed,
their blocks averaged, because another launch of a seed is no new sample of them (rule 12).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import statistics as plain
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

from rich.text import Text

from gnnpar.cli.train import job
from gnnpar.config.application import run_jobs
from gnnpar.config.compose import chosen_files, compose
from gnnpar.config.inputs import quoted
from gnnpar.config.jobs import job_key, jobs_below
from gnnpar.config.study import Variant, job_overrides, read_study
from gnnpar.files import Json, JsonDict, JsonObject, working_in, write_text_whole
from gnnpar.report.statistics import Estimate, geometric_mean, mean
from gnnpar.settings import ConfigError, config_errors
from gnnpar.targets import refuse_foreign
from gnnpar.track.console import num_bytes, pulse, say, seconds, show_table
from gnnpar.track.text import printable
from gnnpar.training.result.result import epoch_time, valid_result

Pair = tuple[int, int]  # (seed, block)
COLUMNS = ("epoch", "bytes", "memory", "accuracy")
Measures = Mapping[str, float | None]


@dataclass(frozen=True)
class Row:
    """A variant beside the base. Estimates are of variant / base (epoch) or variant - base; None: no pair has both.

    epoch [1], bytes [B an epoch], memory [B, the rank with the largest peak], accuracy [points of the test metric].
    """

    variant: str
    pairs: int
    epoch: Estimate | None
    bytes: Estimate | None
    memory: Estimate | None
    accuracy: Estimate | None
    cosine: float | None  # of the gradient with the exact one, mean over probes and runs; None: fidelity_every=0


def run(argv: list[str]) -> int:
    """Return 0: every run completed, 1: some failed. The table has those that completed."""
    options = parse(argv)
    if "RANK" in os.environ:
        raise ConfigError("a study starts its own ranks and cannot join those of torchrun; start it once, without")
    study = read_study(options.study)
    variants = study.variants()
    jobs = study.jobs(variants)
    folder = options.folder or Path("multirun") / options.study.stem
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        check(options.study, variants)
        with config_errors(), working_in(folder, otherwise="give another --folder", say=say):  # it may be running
            write_text_whole(folder / "study.yaml", options.study.read_text(encoding="utf-8"))
        say(f"{options.study}: {len(variants)} variants x {len(study.seed_list)} seeds x {study.blocks} blocks")
        argv = ["-m", *options.overrides, f"hydra.sweep.dir={quoted(str(folder))}"]
        code, keys = run_jobs(argv, job, listed=[job_overrides(*each) for each in jobs])
    named = [(variant.name, seed, block) for variant, seed, block in jobs]
    results = completed(folder, dict(zip(named, keys, strict=True)))
    refuse_other_data(results, folder)
    rows = [row(variant.name, results) for variant in variants]
    timeless = [r["oversubscribed"] or r["provenance"] == "emulated" for r in results.values()]
    if options.json:
        sys.stdout.write(json.dumps(as_json(rows, results, speed=not any(timeless)), indent=1) + "\n")
    else:
        display(rows, base_line(results), speed=not any(timeless))
    return code


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gnnpar ablate", description="What each factor of a study does to its base.")
    parser.add_argument("study", type=Path, metavar="study.yaml", help="base, factors, mode, seeds, blocks, order_seed")
    parser.add_argument("overrides", nargs="*", help="hydra/launcher=..., hydra.sweep...: how the jobs are run")
    parser.add_argument("--folder", type=Path, help="where the runs are (multirun/STUDY); runs that are done stay")
    parser.add_argument("--json", action="store_true", help="the table as JSON; all else on stderr")
    options = parser.parse_args(argv)
    for override in options.overrides:
        if not override.startswith("hydra"):
            raise ConfigError(f"{override}: {options.study} sets what is trained; put it into base")
    return options


def check(file: Path, variants: Sequence[Variant]) -> None:
    """Raise ConfigError where a variant does not compose, or is the same run as another one."""
    seen: dict[str, Variant] = {}
    with pulse(lambda: f"{file}: looking at {len(variants):,} variants"):
        for variant in variants:
            where = " and ".join(variant.keys)
            try:
                settings = compose(variant.overrides, partial(refuse_classes, file, variant))
            except ConfigError as error:
                raise ConfigError(f"{file}: {where}: {error}") from error
            key = job_key(settings.resolved, settings.names)
            if key in seen:
                other = seen[key].name or "the base"
                raise ConfigError(f"{file}: {where} ({variant.name}) is the same run as {other}; leave it out")
            seen[key] = variant


def refuse_classes(file: Path, variant: Variant, tree: JsonObject) -> None:
    """Raise ConfigError for a class that neither gnnpar, nor a plugin, nor YAML that the study chooses names."""
    remedy = "put it into a YAML file of its group and choose it by name, or --trust"
    with config_errors():
        refuse_foreign(tree, str(file), remedy=remedy, named=chosen_files(variant.overrides))


def completed(folder: Path, keys: Mapping[tuple[str, int, int], str]) -> dict[tuple[str, int, int], JsonObject]:
    """Return (variant, seed, block) -> result.json of the runs that completed."""
    results = {job.key: valid_result(job.run_dir) for job in jobs_below(folder)}
    found = {job: results.get(key) for job, key in keys.items()}
    return {job: result for job, result in found.items() if result and result["status"] == "completed"}


def measures(result: JsonObject) -> Measures:
    peak = result["memory_bytes"]["peak"]
    metric = result["metric"]
    test = metric["test_at_best_val"] if metric["test_at_best_val"] is not None else metric["test"]
    return {
        "epoch": epoch_time(result),
        "bytes": result["bytes_per_epoch"]["total"],
        "memory": max(peak) if peak and None not in peak else None,
        "accuracy": None if test is None else 100 * test,
    }


def refuse_other_data(results: Mapping[tuple[str, int, int], JsonObject], folder: Path) -> None:
    """Raise ConfigError where runs of one seed and dataset had different graphs or splits: its data has changed between
    two starts of the study."""
    seen: dict[tuple[str, int], tuple[str, str]] = {}
    for (_, seed, _), result in results.items():
        of_data = json.dumps(result["settings"].get("dataset"), sort_keys=True)
        hashes = result["hashes"]["graph"], result["hashes"]["split"]
        if seen.setdefault((of_data, seed), hashes) != hashes:
            raise ConfigError(
                f"{folder} holds runs of seed {seed} on two graphs or splits of the same name: its data has changed "
                "between two starts; give --folder another name"
            )


def row(variant: str, results: Mapping[tuple[str, int, int], JsonObject]) -> Row:
    """Compare a variant with the base; the row of the base has its number of runs alone."""
    mine = {(seed, block): measures(r) for (name, seed, block), r in results.items() if name == variant}
    base = {(seed, block): measures(r) for (name, seed, block), r in results.items() if name == ""}
    pairs = sorted(mine.keys() & base.keys())
    probes = [r["fidelity"] for (name, *_), r in results.items() if name == variant and r["fidelity"]]
    cosine = plain.fmean(probe["cosine"]["mean"] for probe in probes) if probes else None
    if variant == "":
        return Row("", len(mine), None, None, None, None, cosine)
    differences = {name: by_seed(name, mine, base, pairs) for name in ("bytes", "memory", "accuracy")}
    side_by_side = [pair for pair in pairs if session(results, variant, pair) == session(results, "", pair)]
    return Row(variant, len(pairs), by_block(mine, base, side_by_side), **differences, cosine=cosine)


def session(results: Mapping[tuple[str, int, int], JsonObject], variant: str, pair: Pair) -> str | None:
    """Return the session of a run; only runs of one session form a time ratio."""
    return results[variant, *pair].get("session")


def by_block(mine: Mapping[Pair, Measures], base: Mapping[Pair, Measures], pairs: Sequence[Pair]) -> Estimate | None:
    """Return the geometric mean over blocks of each block's geometric mean of time ratios over seeds."""
    logs: dict[int, list[float]] = {}
    for seed, block in pairs:
        a, b = mine[seed, block]["epoch"], base[seed, block]["epoch"]
        if a and b:
            logs.setdefault(block, []).append(math.log(a / b))
    return geometric_mean([math.exp(plain.fmean(each)) for each in logs.values()]) if logs else None


def by_seed(
    name: str, mine: Mapping[Pair, Measures], base: Mapping[Pair, Measures], pairs: Sequence[Pair]
) -> Estimate | None:
    """Return the mean paired difference over seeds, each the mean over its blocks."""
    differences: dict[int, list[float]] = {}
    for seed, block in pairs:
        a, b = mine[seed, block][name], base[seed, block][name]
        if a is not None and b is not None:
            differences.setdefault(seed, []).append(a - b)
    return mean([plain.fmean(each) for each in differences.values()]) if differences else None


def base_line(results: Mapping[tuple[str, int, int], JsonObject]) -> dict[str, float | None]:
    """Return the measures of the base, means over its runs."""
    baselines = [measures(r) for (name, *_), r in results.items() if name == ""]
    columns = {
        name: [m[name] for m in baselines if m[name] is not None] for name in ("epoch", "bytes", "memory", "accuracy")
    }
    return {name: plain.fmean(values) if values else None for name, values in columns.items()}  # type: ignore[type-var]


def as_json(rows: Sequence[Row], results: Mapping[tuple[str, int, int], JsonObject], *, speed: bool) -> JsonDict:
    """Return the table as JSON, null for unknown. `speed`: times are a statement, as no rank shares a core."""

    def known(value: Json) -> Json:
        if isinstance(value, dict):
            return {name: known(each) for name, each in value.items()}
        return None if isinstance(value, float) and not math.isfinite(value) else value

    base = base_line(results) | {"runs": rows[0].pairs, "cosine": rows[0].cosine}
    return {"speed": speed, "base": base, "rows": [known(asdict(each)) for each in rows[1:]]}


def display(rows: Sequence[Row], base: Mapping[str, float | None], *, speed: bool) -> None:
    shown: dict[str, Callable[[float], str]] = {
        "epoch": seconds,
        "bytes": num_bytes,
        "memory": num_bytes,
        "accuracy": lambda x: f"{x:.2f}",
    }
    cells = ["-" if (value := base[name]) is None else form(value) for name, form in shown.items()]
    lines = [("base", str(rows[0].pairs), *greyed(cells, speed), cosine(rows[0]))]
    for each in rows[1:]:
        ratio = interval(each.epoch, lambda x: f"{x:.3f}")
        sizes = [interval(estimate, signed_bytes) for estimate in (each.bytes, each.memory)]
        points = interval(each.accuracy, lambda x: f"{x:+.2f}")
        cells = greyed([ratio, *sizes, points], speed)
        lines.append((printable(each.variant), str(each.pairs), *cells, cosine(each)))
    columns = ("variant", "pairs", "epoch, ratio", "sent/epoch", "peak/rank", "test, points", "cosine")
    show_table(columns, lines, title="differences to the base, with 95 % intervals", left=(0,))
    if not speed:
        say("(times in parentheses) more threads than cores, or ranks as threads: no statement on speed")


def greyed(cells: list[str], speed: bool) -> list[str | Text]:
    return [*cells] if speed else [Text(f"({cells[0]})", style="dim"), *cells[1:]]


def cosine(each: Row) -> str:
    return "-" if each.cosine is None else f"{each.cosine:.4f}"


def interval(estimate: Estimate | None, form: Callable[[float], str]) -> str:
    """Return '1.234 (1.1 to 1.3)'; the value alone where one sample allows no interval or all samples agree."""
    if estimate is None:
        return "-"
    if math.isnan(estimate.low) or estimate.low == estimate.high:
        return form(estimate.value)
    return f"{form(estimate.value)} ({form(estimate.low)} to {form(estimate.high)})"


def signed_bytes(value: float) -> str:
    return "0" if value == 0 else ("-" if value < 0 else "+") + num_bytes(abs(value))
