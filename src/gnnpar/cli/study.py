"""`gnnpar study FILE`: run cells x methods, or factors, in randomised blocks; print tables, draw a figure.

Time ratios are formed inside blocks, one per block (protocol, rule 5). Bytes, memory and accuracy are paired by seed
and averaged over blocks, because another launch of a seed adds no sample (rule 12).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

from gnnpar.cli.train import job
from gnnpar.config.compose import chosen_files, compose
from gnnpar.config.inputs import quoted
from gnnpar.config.jobs import job_key, jobs_below
from gnnpar.config.study import Study, Variant, job_overrides, read_study
from gnnpar.files import JsonObject, working_in, write_text_atomic
from gnnpar.report import latex
from gnnpar.report import study as reports
from gnnpar.report.columns import Runs, timeless
from gnnpar.report.comparison import compare
from gnnpar.report.figures import on_paper
from gnnpar.report.page import write_page
from gnnpar.report.runs import collect
from gnnpar.settings import ConfigError, config_errors
from gnnpar.targets import foreign_in, refuse_foreign
from gnnpar.track.console import progress_lines, say, show_table
from gnnpar.track.text import counted, printable
from gnnpar.training.result.result import valid_result

OWN = Path(__file__).parents[1] / "templates" / "study"
Results = Mapping[tuple[Variant, int, int], JsonObject]


def run(argv: list[str]) -> int:
    """Return 0 if every run completed, else 1. The tables have the reasons of failed runs."""
    options = parse(argv)
    from gnnpar.config.sweep import run_jobs  # imports Hydra

    if "RANK" in os.environ:
        raise ConfigError("a study starts its own ranks and cannot join those of torchrun; start it once, without")
    study = read_study(file := file_of(options.study))
    with config_errors(str(options.study)):
        reports.check(study)
    variants = study.variants()
    jobs = study.jobs(variants)
    folder = options.folder or Path("multirun") / options.study.stem
    with contextlib.redirect_stdout(sys.stderr) if options.json else contextlib.nullcontext():
        check(options.study, variants)
        with config_errors(), working_in(folder, remedy="give another --folder", say=say):  # it may be running
            write_text_atomic(folder / "study.yaml", file.read_text(encoding="utf-8"))
        counts = counted(len(study.seed_list), "seed"), counted(study.blocks, "block")
        say(f"{options.study}: {counted(len(variants), 'variant')} x {' x '.join(counts)}")
        argv = ["-m", *options.overrides, f"hydra.sweep.dir={quoted(str(folder))}"]
        code, keys = run_jobs(argv, job, listed=[job_overrides(*each) for each in jobs])
        places = {job.key: job.run_dir for job in jobs_below(folder)}
        run_dirs = {each: places[key] for each, key in zip(jobs, keys, strict=True) if key in places}
        results = {each: result for each, run_dir in run_dirs.items() if (result := valid_result(run_dir))}
        refuse_other_data(results, folder)
        runs: dict[tuple[str, ...], dict[tuple[int, int], JsonObject]] = {}  # place -> (seed, block) -> result
        for (variant, seed, block), result in results.items():
            runs.setdefault(variant.place, {})[seed, block] = result
        report(study, runs, folder, shown=not options.json)
        page(
            study, runs, folder, [run_dirs[each] for each in sorted(results, key=lambda each: variants.index(each[0]))]
        )
        for line in ("", *study.note.splitlines()) if study.note else ():
            say(line)
    if options.json:
        sys.stdout.write(json.dumps(reports.as_json(study, runs), indent=1) + "\n")
    return code


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gnnpar study", description="Run a study; what was run already is not run again.")
    own = ", ".join(sorted(file.stem for file in OWN.glob("*.yaml")))
    help_of_file = f"cells, methods, common, run, table; or base, factors; or a study of gnnpar's own: {own}"
    parser.add_argument("study", type=Path, metavar="FILE", help=help_of_file)
    parser.add_argument("overrides", nargs="*", help="hydra/launcher=..., hydra.sweep...: how the jobs are run")
    parser.add_argument(
        "--folder", type=Path, help="where the runs are (multirun/FILE); report.html, report.md, table.tex, figure.svg"
    )
    parser.add_argument("--json", action="store_true", help="the tables as JSON; all else on stderr")
    options = parser.parse_args(argv)
    for override in options.overrides:
        if not override.startswith("hydra"):
            raise ConfigError(f"{override}: {options.study} sets what is trained; put it into base")
    return options


def file_of(named: Path) -> Path:
    """Return the file, or gnnpar's own study of this name."""
    own = OWN / f"{named}.yaml"
    return own if not named.is_file() and own.parent == OWN and own.exists() else named


def check(file: Path, variants: Sequence[Variant]) -> None:
    """Raise ConfigError if a variant does not compose, or is the same run as another one."""
    seen: dict[str, Variant] = {}
    with progress_lines(lambda: f"{file}: looking at {len(variants):,} variants"):
        for variant in variants:
            where = " and ".join(variant.keys)
            with config_errors(f"{file}: {where}"):
                settings = compose(variant.overrides, partial(refuse_classes, file, variant))
            key = job_key(settings.resolved, settings.names)
            if key in seen:
                other = seen[key].name or "the base"
                raise ConfigError(f"{file}: {where} ({variant.name}) is the same run as {other}; leave it out")
            seen[key] = variant


def refuse_classes(file: Path, variant: Variant, tree: JsonObject) -> None:
    """Raise ConfigError for a class named neither by gnnpar, nor a plugin, nor YAML that the study chooses."""
    remedy = "put it into a YAML file of its group and choose it by name, or --trust"
    if foreign_in(tree):
        with config_errors():
            refuse_foreign(tree, str(file), remedy=remedy, named=chosen_files(variant.overrides))


def refuse_other_data(results: Results, folder: Path) -> None:
    """Raise ConfigError if runs of one seed and dataset had different graphs or splits, since the data changed between
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


def report(study: Study, runs: Runs, folder: Path, *, shown: bool) -> None:
    """Print the tables, and write report.md, table.tex and figure.svg into the folder."""
    tables = reports.tables(study, runs)
    if any(timeless(study, result) for each in runs.values() for result in each.values()):
        say("times are left out (-): more threads than cores, or ranks as threads; shared_cores: true shows them")
    headline = reports.headline(study, runs)
    write_text_atomic(folder / "report.md", f"{headline}\n\n" * bool(headline) + reports.as_markdown(tables))
    write_text_atomic(folder / "table.tex", "\n".join(latex.as_latex(table, keep=True) for _, table in tables))
    if study.figure is not None:
        with on_paper():
            reports.draw(study, study.figure, runs).savefig(folder / "figure.svg", metadata={"Date": None})
    for line in ("", headline, "") if headline and shown else ():
        say(line)
    for title, table in tables if shown else ():
        left = [i for i, text in enumerate(table.texts) if text]
        lines = [[printable(cell) for cell in line] for line in table.lines]
        show_table(table.headings, lines, title=title, left=left)
    say(f"tables and figure  ->  {folder}")


def page(study: Study, runs: Runs, folder: Path, ended: Sequence[Path]) -> None:
    """Write report.html, as `gnnpar compare` does, of the folders of runs that have ended."""
    if not ended:
        return
    results = collect(ended)
    strategies = [result["strategy"] for _, result in results]
    comparison = compare(results, baseline="single" if "single" in strategies else strategies[0])
    write_page(comparison, file := folder / "report.html", headline=reports.headline(study, runs))
    say(f"page  ->  {os.path.relpath(file)}")
