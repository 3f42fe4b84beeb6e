"""Studies that are a file, NAME/study.yaml (docs/guide/studies.md): their raw lines, tables and figures.

python experiments/declared.py run NAME [--blocks N] [--smoke]     # NAME/results.jsonl; --smoke: does it run?
python experiments/declared.py report NAME [FILE] [--figure FILE]  # tables of README.md; figure.svg

What was run already is not run again. NAME/own.py may have what a file cannot say: draw(study, runs, file) of the
figure, job(row) of a raw line that does not name its job.
"""

import argparse
import runpy
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import blocks
import pictures
import records

from gnnpar.comm.world import num_cores
from gnnpar.config.study import Study, Variant, read_study
from gnnpar.report.columns import Runs
from gnnpar.report.study import as_markdown, check, draw, tables

SMOKE = ["epochs=8", "eval_every=8"]


def read(folder: Path) -> Study:
    study = read_study(folder / "study.yaml")
    check(study)
    return study


def own(folder: Path) -> Mapping[str, Callable[..., Any]]:
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


def report(folder: Path, file: Path, figure: Path) -> None:
    study = read(folder)
    runs = runs_of(study, file)
    print(as_markdown(tables(study, runs)), end="")
    if "draw" in (mine := own(folder)):
        mine["draw"](study, runs, figure)
    elif study.figure is not None:
        pictures.pyplot(study.figure.letters)
        pictures.save(draw(study, study.figure, runs), figure)


def run(folder: Path, *, count: int | None, smoke: bool) -> None:
    """Blocks of times, one after the other; seeds where times do not count, as many at a time as there are cores."""
    study = read(folder)
    out = folder / f"{'smoke' if smoke else 'results'}.jsonl"
    common = [*study.smoke, *SMOKE] if smoke else []
    by_limit: dict[int, list[Variant]] = {}
    for variant in study.variants():
        by_limit.setdefault(1 if smoke else study.most(variant), []).append(variant)
    for limit, variants in by_limit.items():
        if len(study.seed_list) > 1:
            seeds = ",".join(map(str, study.seed_list[:limit]))
            jobs = {each.name: [*each.overrides, f"seed={seeds}", *common] for each in variants}
            blocks.sweep(jobs, common=[], out=out, at_once=1 if smoke else num_cores())
        else:
            jobs = {each.name: [*each.overrides, f"seed={study.seed_list[0]}", *common] for each in variants}
            blocks.run(jobs, blocks=range(min(limit, count or limit)), common=[], out=out, whole=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", choices=["run", "report"])
    parser.add_argument("study", metavar="NAME")
    parser.add_argument("file", nargs="?", type=Path, help="of report: raw lines (NAME/results.jsonl)")
    parser.add_argument("--figure", type=Path, help="of report (NAME/figure.svg)")
    parser.add_argument("--blocks", type=int, help="of run: so many (as the file has it)")
    parser.add_argument("--smoke", action="store_true", help="of run: tiny graphs, one block; writes smoke.jsonl")
    options = parser.parse_args(arguments)
    folder = HERE / options.study
    if options.what == "run":
        run(folder, count=options.blocks, smoke=options.smoke)
    else:
        report(folder, options.file or folder / "results.jsonl", options.figure or folder / "figure.svg")


if __name__ == "__main__":
    main()
