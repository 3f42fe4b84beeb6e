"""Studies: their raw lines, tables and figures.

    python experiments/study.py run NAME [PART ...]            # raw lines; -h: the options of this study
    python experiments/study.py report NAME [--figure FILE]    # tables of README.md, and figure.svg
    python experiments/study.py all compare|rest|NAME ...      # from nothing, in a copy without lines

A study is a folder with study files (docs/guide/studies.md): study.yaml writes results.jsonl, PART.yaml writes
PART.jsonl. What was run already is not run again. What files cannot say is in modules beside them. run.py may have
prepare(files, studies), variants(files, name, variants), launch(overrides, failures=) in place of `gnnpar train`, and
PROGRAMS: name -> function(files, names of --of). report.py may have job(row) of lines that do not name their jobs,
before(files, measured) for text above the tables, and draw(files, name, study, runs). Or they have run(files, ...) and
report(files, ...), with their options as keywords.

`all` runs a list of all.yaml, or some of its studies, in OUT/experiments: what is committed stays as it is, and none of
it counts as done. Stopped and started again, the same command goes on. Tables and figures then lie in the folders of
the copy (report.md, figure.svg); whether headline numbers lie where expected.toml has them is printed.
"""

import argparse
import functools
import inspect
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import blocks
import npz_graphs
import records
import reports
import yaml
from records import Files

from gnnpar.comm.world import num_cores
from gnnpar.config.study import Study, Variant, merged, read_study
from gnnpar.launch.emulated.paced import trial
from gnnpar.report.columns import Runs
from gnnpar.report.study import as_markdown, check, draw, tables
from gnnpar.settings import ConfigError

HERE = Path(__file__).parent
ROOT = HERE.parent
SMOKE = ["epochs=8", "eval_every=8"]
RAW = {"cora": "Cora", "citeseer": "CiteSeer", "computers": "Computers", "cs": "CS", "squirrel": "Squirrel"}
RAW |= {"physics": "Physics", "tolokers": "tolokers", "debian": "debian"}  # dataset -> its folder of raw files
LINES = ("*.jsonl", "*.xz", "*.csv", "*.svg", "*.npz", "*.part", "*.json", "__pycache__", "smoke*")
trial = functools.cache(trial)  # whether links can be shaped here


def own(folder: Path, name: str) -> Mapping[str, Any]:
    """Return the names of a folder's module, none if it has no such file."""
    file = folder / f"{name}.py"
    if not file.exists():
        return {}
    spec = spec_from_file_location(f"{folder.name}.{name}", file)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)  # its classes can be pickled
    spec.loader.exec_module(module)
    return vars(module)


def parts(folder: Path) -> dict[str, Study]:
    """Return the study files of a folder by the names of their lines."""
    found = {}
    for file in sorted(folder.glob("*.yaml")):
        if file.stem != "methods":  # of several files
            study = found["results" if file.stem == "study" else file.stem] = read_study(file)
            check(study)
    return found


def options(function: Callable[..., Any], words: Sequence[str], **more: Any) -> dict[str, Any]:
    """Return what the command line says of the keywords of a function, and of more, by the types of their defaults."""
    parser = argparse.ArgumentParser(description=function.__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for each in inspect.signature(function).parameters.values():
        if each.kind is each.VAR_POSITIONAL:
            parser.add_argument(each.name, nargs="*")
        elif each.kind is each.KEYWORD_ONLY:
            more[each.name] = each.default
    for name, default in more.items():
        how = {bool: {"action": "store_true"}, tuple: {"nargs": "*"}}.get(type(default), {"type": type(default)})
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    return vars(parser.parse_args(words))


def runs_of(study: Study, rows: Sequence[records.Row], mine: Mapping[str, Any]) -> Runs:
    """Return the results in raw lines, by place, seed and block."""
    places = {variant.name: variant.place for variant in study.variants()}
    job = mine.get("job", lambda row: row["job"])
    found: dict[tuple[str, ...], dict[tuple[int, int], dict]] = {}
    for row in rows:
        result = row.get("result", row)
        found.setdefault(places[job(row)], {})[result.get("seed", 0), row.get("block", 0)] = result
    return found


def report_files(mine: Mapping[str, Any], studies: Mapping[str, Study], files: Files) -> None:
    """Print the tables of study files."""
    measured = {name: (study, runs_of(study, files.read(name), mine)) for name, study in studies.items()}
    shown = [mine["before"](files, measured)] if "before" in mine else []
    for name, (study, runs) in measured.items():
        shown += [as_markdown(tables(study, runs))] if runs and (study.table or study.tables) else []
        if "draw" in mine:
            mine["draw"](files, name, study, runs)
        elif study.figure is not None:
            reports.pyplot(study.figure.letters)
            reports.save(draw(study, study.figure, runs), files.figure)
    if not shown:
        raise SystemExit(f"there are no lines in {files.folder}, and its study has no text above them")
    print(*shown, sep="" if shown[0].startswith("#") else "\n", end="")


def lacks(variant: Variant) -> str:
    """Return why a job cannot run here, or ''."""
    data = Path(os.environ["GNNPAR_DATA"])
    needed = [data / RAW[o[8:]] for o in variant.overrides if o.startswith("dataset=") and o[8:] in RAW]
    paths = [o[13:].replace("${oc.env:", "${") for o in variant.overrides if o.startswith("dataset.path=")]
    missing = [each for each in (*needed, *map(Path, map(os.path.expandvars, paths))) if not each.exists()]
    said = trial() if "launch=paced" in variant.overrides else ""
    return f"no {missing[0]}" if missing else f"launch=paced {said[4:]}" if said.startswith("no: ") else ""


def chosen(study: Study, of: Sequence[str]) -> list[Variant]:
    """Return the variants with the given names; an axis without any of the names keeps all of its own."""
    asked = {axis: names & set(of) or names for axis, names in ((a, set(each)) for a, each in study.axes.items())}
    return [v for v in study.variants() if all(n in asked[a] for a, n in study.named(v.place).items())]


def run_files(
    mine: Mapping[str, Any],
    known: Mapping[str, Study],
    files: Files,
    *names: str,
    of: tuple[str, ...] = (),
    blocks: int = 0,
    seeds: int = 0,
    at_once: int = num_cores(),
    list: bool = False,
) -> None:
    """Run study files, or some.

    of: these cells or methods alone. blocks, seeds: so many (as the file has it). at_once: seeds at a time.
    list: print for each cell how many runs are there and the hours left, and run nothing.
    """
    programs = mine.get("PROGRAMS", {})
    if unknown := set(names) - {*known, *programs}:
        raise SystemExit(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join([*known, *programs])}")
    some = {name: known[name] for name in names or known if name in known and (names or not name.startswith("quick_"))}
    there = {name for study in some.values() for names in study.axes.values() for name in names}
    if some and (unknown := set(of) - there):
        raise SystemExit(
            f"there is no cell or method {', '.join(sorted(unknown))}; there are {', '.join(sorted(there))}"
        )
    if not list:
        text = " ".join(override for s in some.values() for each in s.variants() for override in each.overrides)
        for write in (write for variable, write in npz_graphs.WRITTEN.items() if variable in text):
            write()
        mine.get("prepare", lambda *_: None)(files, known)
        for name in (name for name in names or programs if name in programs):
            programs[name](files, of)
    broken, count = [], blocks or seeds or None
    for name, study in some.items():
        variants = chosen(study, of)
        if list:
            listed(study, variants, files(name), count)
            continue
        reasons = {each: lacks(each) for each in variants}
        for why in dict.fromkeys(filter(None, reasons.values())):
            print(f"skipped: {why}", flush=True)
        variants = [each for each, why in reasons.items() if not why]
        try:
            variants = mine["variants"](files, name, variants) if "variants" in mine else variants
            run(study, variants, files(name), count, files.smoke, at_once, mine.get("launch"))
        except (SystemExit, ConfigError) as error:  # the others may still run
            print(f"{name}: {error}", flush=True)
            broken.append(name)
    if broken:
        raise SystemExit(f"not whole: {', '.join(broken)}; the same command goes on")


def run(
    study: Study,
    variants: Sequence[Variant],
    out: Path,
    count: int | None,
    smoke: bool,
    at_once: int,
    launch: blocks.Train | None,
) -> None:
    """Blocks of times, one after the other, each with its own seed where there are several; seeds where times do not
    count, cell by cell, `at_once` at a time."""
    last, seeds = [*SMOKE, *study.smoke] if smoke else [], study.seed_list
    in_blocks = len(seeds) == 1 or "quiet" in study.needs
    seed = [] if not in_blocks else ["seed=${block}"] if len(seeds) > 1 else [f"seed={seeds[0]}"]
    groups: dict[tuple[int, tuple[str, ...]], dict[str, Sequence[str]]] = {}
    for each in variants:
        limit = 1 if smoke else min(study.max_runs(each), count or study.max_runs(each))
        group = groups.setdefault((limit, () if in_blocks else each.place[:-1]), {})
        group[each.name] = merged(each.overrides, seed, last)
    for (limit, _), jobs in groups.items():
        if in_blocks:
            blocks.run(jobs, blocks=seeds[:limit] if len(seeds) > 1 else range(limit), out=out, launch=launch)
        else:
            blocks.seeded(jobs, seeds=seeds[:limit], out=out, at_once=1 if smoke else at_once)


def listed(study: Study, variants: Sequence[Variant], out: Path, count: int | None) -> None:
    """Print for each cell how many runs are there, and the hours of one core that the others take."""
    rows = records.read(out)
    for cell in dict.fromkeys(each.place[:-1] for each in variants):
        limits = {v.name: min(study.max_runs(v), count or study.max_runs(v)) for v in variants if v.place[:-1] == cell}
        there = [row for row in rows if row["job"] in limits and row["block"] < limits[row["job"]]]
        ended = [row["result"] for row in rows if row["job"] in limits and row["result"]["error"] is None]
        wall = [each["train_wall_seconds"] + sum(each["cold_start_seconds"].values()) for each in ended]
        left = sum(limits.values()) - len(there)
        hours = f"{left * sum(wall) / len(wall) / 3600:.1f} core hours left" if wall else "no line says how long"
        print(f"{'; '.join(cell) or out.stem}: {len(there)} of {sum(limits.values())} runs; {hours}")


# lists of studies


@dataclass(frozen=True)
class Listed:
    """A study of a list, as all.yaml describes it."""

    name: str
    folder: str
    run: Sequence[Sequence[str]]
    report: Sequence[str] | None
    minutes: int
    needs: Sequence[str]

    def ended(self, experiments: Path) -> Path:
        """Return the file that marks it as done."""
        return experiments / self.folder / f"ended.{self.name}"


def lists() -> dict[str, list[Listed]]:
    """Return the lists of all.yaml."""
    found: dict[str, list[Listed]] = {}
    for key, studies in yaml.safe_load((HERE / "all.yaml").read_text(encoding="utf-8")).items():
        for name, told in studies.items() if isinstance(studies, dict) else ():
            folder = told.get("folder", name)
            files = [] if "minutes" in told else list(parts(HERE / folder).values())
            minutes = told.get("minutes", sum(study.minutes for study in files))
            needs = told.get("needs", sorted({need for study in files for need in study.needs}))
            study = Listed(name, folder, told.get("run", [[]]), told.get("report", []), minutes, needs)
            found.setdefault(key, []).append(study)
    return found


def every(*names: str, list: bool = False, out: str = "") -> None:
    """Run studies from nothing.

    names: compare, rest, or of studies. list: print what would run and how long, and run nothing.
    out: folder of the copy (outputs/compare, outputs/studies).
    """
    every = lists()
    known = {study.name: study for some in every.values() for study in some}
    if unknown := [name for name in names if name not in known and name not in every]:
        raise SystemExit(f"there is no study {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    some = [study for name in names for study in (every.get(name) or [known[name]])]
    folder = Path(out or ROOT / "outputs" / ("compare" if names == ("compare",) else "studies"))
    experiments, broken = folder.resolve() / "experiments", []
    if list:
        for study in some:
            needs = [words for need, words in (("root", "root"), ("quiet", "a quiet machine")) if need in study.needs]
            done = ", done" * study.ended(experiments).exists()
            print(f"{study.name}: {study.minutes} minutes, needs {' and '.join(needs) or 'nothing'}{done}")
        print(f"{sum(study.minutes for study in some) / 60:.1f} hours in all")
        return
    copied(folder)
    for i, study in enumerate(some):
        after = sum(other.minutes for other in some[i + 1 :])
        state = "done" if study.ended(experiments).exists() else f"{study.minutes} minutes"
        print(f"[{i + 1}/{len(some)}] {study.name}: {state}, then {after}", flush=True)
        if state != "done" and not is_whole(study, experiments):
            print(f"{study.name} is not whole", flush=True)
            broken.append(study.name)
    if broken:
        raise SystemExit(f"not whole: {', '.join(broken)}; the same command goes on")


def copied(out: Path) -> Path:
    """Copy this folder without its lines to OUT, or bring it up to date; lines that are there stay."""
    folder = out.resolve() / "experiments"
    for program in list(folder.rglob("*.py")):
        if not (HERE / program.relative_to(folder)).exists():  # of an earlier version
            program.unlink()
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns(*LINES), dirs_exist_ok=True)
    if not (tests := out / "tests").is_symlink():  # modules of two studies are there
        tests.symlink_to(ROOT / "tests", target_is_directory=True)
    return folder


def is_whole(study: Listed, experiments: Path) -> bool:
    """Run a study of the copy and its report. Return True if all of it ended."""
    folder, program = experiments / study.folder, [sys.executable, str(experiments / "study.py")]
    for arguments in study.run:
        ended = subprocess.run([*program, "run", study.folder, *arguments], check=False).returncode
        if ended < 0:  # by a signal, which means all of them
            raise SystemExit(f"{study.name} was ended by signal {-ended}; the same command goes on with it")
        if ended:
            return False
    if study.report is not None:
        command = [*program, "report", study.folder, *study.report]
        told = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False, cwd=folder)
        if told.returncode:
            return False
        (folder / "report.md").write_text(told.stdout, encoding="utf-8")
        expected = [sys.executable, str(experiments / "check.py"), "expected", study.folder]
        subprocess.run(expected, input=told.stdout, text=True, check=False)  # a number outside is no failure
    study.ended(experiments).touch()
    return True


def call(what: str, name: str, words: Sequence[str] = ()) -> None:
    """Run or report a study, with the options of its own program or of study files.

    --folder: of its lines (NAME). --figure: to draw (figure.svg beside them). --smoke: in small, to smoke_*.jsonl.
    """
    folder = HERE / name
    mine, of_files = own(folder, what), {"run": run_files, "report": report_files}[what]
    function = mine[what] if what in mine else functools.partial(of_files, mine, parts(folder))
    given = options(function, words, folder="", figure="", smoke=False)
    lines = Path(given.pop("folder") or folder)
    if what == "run":
        lines.mkdir(parents=True, exist_ok=True)
    files = Files(lines, Path(given.pop("figure") or lines / "figure.svg"), given.pop("smoke"))
    function(files, *given.pop("names", ()), **given)


def main(words: Sequence[str]) -> None:
    os.environ.setdefault("GNNPAR_DATA", str(ROOT.parent / "shared" / "data"))
    os.environ.setdefault("GNNPAR_SESSION", uuid.uuid4().hex[:12])
    match words:
        case "all", *rest:
            given = options(every, rest)
            every(*given.pop("names"), **given)
        case "run" | "report" as what, name, *rest:
            call(what, name, rest)
        case _:
            raise SystemExit(__doc__)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
