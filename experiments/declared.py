"""Studies that are files (docs/guide/studies.md): their raw lines, tables and figures.

python experiments/declared.py run NAME [PART ...] [--of CELL METHOD ...] [--blocks N] [--smoke]    # raw lines
python experiments/declared.py report NAME [--figure FILE]    # tables of README.md; figure.svg

NAME/study.yaml writes results.jsonl; where NAME/own.py has PARTS, PART.yaml writes PART.jsonl.

What was run already is not run again. NAME/own.py may have what a file cannot say: draw(study, runs, file) of a
part's figure, job(row) of a raw line that does not name its job, before(), text above the tables, prepare().
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


def run(folder: Path, name: str, study: Study, *, of: Sequence[str], count: int | None, smoke: bool) -> None:
    """Blocks of times, one after the other; seeds where times do not count, as many at a time as there are cores.

    of: names of cells and methods; on an axis that has some of them, no others run.
    """
    out = folder / f"{'smoke_' * smoke}{name}.jsonl"
    last = [*SMOKE, *study.smoke] if smoke else []
    by_limit: dict[int, list[Variant]] = {}
    asked = {axis: names & set(of) or names for axis, names in ((a, set(each)) for a, each in study.axes.items())}
    for variant in (v for v in study.variants() if all(n in asked[a] for a, n in study.named(v.place).items())):
        by_limit.setdefault(1 if smoke else study.most(variant), []).append(variant)
    for limit, variants in by_limit.items():
        seeds = ",".join(map(str, study.seed_list[:limit]))
        jobs = {each.name: merged(each.overrides, [f"seed={seeds}"], last) for each in variants}
        if len(study.seed_list) > 1:
            blocks.sweep(jobs, common=[], out=out, at_once=1 if smoke else num_cores())
        else:
            blocks.run(jobs, blocks=range(min(limit, count or limit)), common=[], out=out, whole=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("study", metavar="NAME")
    parser.add_argument("parts", nargs="*", metavar="PART", help="of run: these parts (all)")
    parser.add_argument("--figure", type=Path, help="of report (NAME/figure.svg)")
    parser.add_argument("--of", nargs="+", default=(), metavar="NAME", help="of run: these cells or methods alone")
    parser.add_argument("--blocks", type=int, help="of run: so many (as the file has it)")
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
    chosen = {name: known[name] for name in options.parts or known}
    there = {name for study in chosen.values() for names in study.axes.values() for name in names}
    if unknown := set(options.of) - there:
        parser.error(f"there is no cell or method {', '.join(sorted(unknown))}; there are {', '.join(sorted(there))}")
    own(folder).get("prepare", lambda: None)()
    for name, study in chosen.items():
        run(folder, name, study, of=options.of, count=options.blocks, smoke=options.smoke)


if __name__ == "__main__":
    main()
