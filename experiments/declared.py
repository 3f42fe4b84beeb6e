"""Studies that are files (docs/guide/studies.md): their raw lines, tables and figures.

python experiments/declared.py run NAME [PART ...] [--of CELL METHOD ...] [--blocks N] [--smoke]    # raw lines
python experiments/declared.py run NAME --list    # runs done of how many, hours left
python experiments/declared.py report NAME [--figure FILE]    # tables of README.md; figure.svg

NAME/study.yaml writes results.jsonl; where NAME/own.py has PARTS, PART.yaml writes PART.jsonl.

What was run already is not run again. NAME/own.py may have what a file cannot say: draw(study, runs, file) of a
part's figure, job(row) of a raw line that does not name its job, before(), text above the tables, prepare(),
launch(overrides, failures=) in the place of `gnnpar train`, and lacks(variant), why it cannot run here.
"""

import argparse
import os
import runpy
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
SHARED = HERE.parents[1] / "shared" / "data"
sys.path.insert(0, str(HERE))

import blocks
import pictures
import records

from gnnpar.comm.world import num_cores
from gnnpar.config.study import Study, Variant, merged, read_study
from gnnpar.report.columns import Runs
from gnnpar.report.study import as_markdown, check, draw, tables

SMOKE = ["epochs=8", "eval_every=8"]


def parts(folder: Path) -> dict[str, Study]:
    """The studies of a folder by the names of their lines."""
    found: dict[str, Study] = {}
    for name in own(folder).get("PARTS", ("study",)):
        study = read_study(folder / f"{name}.yaml")
        check(study)
        found["results" if name == "study" else name] = study
    return found


def own(folder: Path) -> Mapping[str, Any]:
    file = folder / "own.py"
    return runpy.run_path(str(file)) if file.exists() else {}


def runs_of(study: Study, file: Path) -> Runs:
    """The results in raw lines, by place, seed and block."""
    job = own(file.parent).get("job", lambda row: row["job"])
    places = {variant.name: variant.place for variant in study.variants()}
    found: dict[tuple[str, ...], dict[tuple[int, int], dict]] = {}
    for row in records.read(file):
        result = row.get("result", row)
        place = places[job(row)]
        found.setdefault(place, {})[result.get("seed", 0), row.get("block", 0)] = result
    return found


def report(folder: Path, figure: Path) -> None:
    mine = own(folder)
    shown = [mine["before"]()] if "before" in mine else []
    for name, study in parts(folder).items():
        runs = runs_of(study, folder / f"{name}.jsonl")
        shown += [as_markdown(tables(study, runs))] if runs and (study.table or study.tables) else []
        if "draw" in mine:
            mine["draw"](study, runs, figure)
        elif study.figure is not None:
            pictures.pyplot(study.figure.letters)
            pictures.save(draw(study, study.figure, runs), figure)
    print(*shown, sep="" if shown[0].startswith("#") else "\n", end="")


def chosen(study: Study, of: Sequence[str]) -> list[Variant]:
    """Return the variants with the given names; an axis without any of the names keeps all of its own."""
    asked = {axis: names & set(of) or names for axis, names in ((a, set(each)) for a, each in study.axes.items())}
    return [v for v in study.variants() if all(n in asked[a] for a, n in study.named(v.place).items())]


def run(
    study: Study,
    variants: Sequence[Variant],
    out: Path,
    *,
    count: int | None = None,
    smoke: bool = False,
    at_once: int,
    launch: blocks.Train | None = None,
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("study", metavar="NAME")
    parser.add_argument("parts", nargs="*", metavar="PART", help="of run: these parts (all)")
    parser.add_argument("--figure", type=Path, help="of report (NAME/figure.svg)")
    parser.add_argument("--of", nargs="+", default=(), metavar="NAME", help="of run: these cells or methods alone")
    parser.add_argument("--blocks", "--seeds", dest="count", type=int, help="of run: so many (as the file has it)")
    parser.add_argument("--at-once", type=int, default=num_cores(), help="of run: seeds at a time")
    parser.add_argument("--list", action="store_true", help="of run: say how many runs are there, and run nothing")
    parser.add_argument("--smoke", action="store_true", help="of run: tiny graphs, one block; writes smoke_*.jsonl")
    options = parser.parse_args(arguments)
    folder = HERE / options.study
    if options.what == "report":
        report(folder, options.figure or folder / "figure.svg")
        return
    os.environ.setdefault("GNNPAR_DATA", str(SHARED))
    known = parts(folder)
    if unknown := set(options.parts) - known.keys():
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    some = {name: known[name] for name in options.parts or known}
    there = {name for study in some.values() for names in study.axes.values() for name in names}
    if unknown := set(options.of) - there:
        parser.error(f"there is no cell or method {', '.join(sorted(unknown))}; there are {', '.join(sorted(there))}")
    mine = own(folder)
    if not options.list:
        mine.get("prepare", lambda: None)()
    for name, study in some.items():
        out, variants = folder / f"{'smoke_' * options.smoke}{name}.jsonl", chosen(study, options.of)
        if options.list:
            listed(study, variants, out, options.count)
            continue
        reasons = {each: mine.get("lacks", lambda _: "")(each) for each in variants}
        for why in dict.fromkeys(filter(None, reasons.values())):
            print(f"skipped: {why}", flush=True)
        variants = [each for each, why in reasons.items() if not why]
        launch = mine.get("launch")
        run(study, variants, out, count=options.count, smoke=options.smoke, at_once=options.at_once, launch=launch)


if __name__ == "__main__":
    main()
