"""Every strategy by one protocol: time in blocks, accuracy over seeds, on sbm, its presets and real graphs.

python experiments/compare_all/run.py --list           # the studies, how many runs, about how long
python experiments/compare_all/run.py speed accuracy   # some of them, or all (9.5 hours); lines land beside this file
python experiments/compare_all/run.py --quick          # the rehearsal: all in small, ten minutes
make compare                                           # most of it, from nothing, beside other studies (all_studies.py)

A study that was stopped goes on where it was; of one in blocks the block begins again.
"""

import argparse
import functools
import os
import sys
import uuid
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import declared
import records

from gnnpar.config.study import Study, Variant, merged
from gnnpar.launch.emulated.paced import trial
from gnnpar.settings import ConfigError
from studies import QUICK, STUDIES, TRIALS, TUNED, num_runs

FILES = {"cora": "Cora", "citeseer": "CiteSeer", "computers": "Computers", "cs": "CS"}  # folders of raw files
FILES |= {"squirrel": "Squirrel", "tolokers": "tolokers"}
paced = functools.cache(trial)  # whether links can be shaped here


def lacks(name: str, data_dir: Path) -> str | None:
    """Return the reason for which a study cannot run here."""
    files = FILES.get(name.removeprefix("quick_"))
    if files and not (data_dir / files).exists():
        return f"no {data_dir / files}; --data-dir DIR or GNNPAR_DATA names the folder of raw files"
    if "paced" in name and (said := paced()).startswith("no: "):
        return f"launch=paced {said.removeprefix('no: ')}"
    return None


def tuned(name: str, study: Study, out: Path) -> list[Variant]:
    """Return every job as it comes and with what its trials chose (rule 14); they have a seed that is not reported."""
    import tune

    variants: list[Variant] = []
    for each in study.variants():
        model, job = each.place[0], list(each.overrides)
        print(f"{each.name}: {TRIALS[name]} trials of conf/tune/{model}.yaml", flush=True)
        chosen = tune.tuned(job, space=model, trials=TRIALS[name], seed=0, out=out / f"{name}_trials.jsonl")
        variants += [each, replace(each, name=f"{each.name}{TUNED}", overrides=merged(job, chosen))]
    return variants


def chosen(names: Sequence[str], quick: bool) -> dict[str, Study]:
    known = QUICK if quick else STUDIES
    if unknown := [name for name in names if name not in known]:
        raise SystemExit(f"there is no study {', '.join(unknown)}; there are {', '.join(known)}")
    return {name: known[name] for name in names or known}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="default: all")
    parser.add_argument("--quick", action="store_true", help="a rehearsal of ten minutes, whose figures say nothing")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the raw lines (beside this file)")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", declared.SHARED)))
    options = parser.parse_args()
    os.environ.setdefault("GNNPAR_SESSION", uuid.uuid4().hex[:12])
    os.environ["GNNPAR_DATA"] = str(options.data_dir.resolve())
    options.out.mkdir(parents=True, exist_ok=True)
    studies, broken = chosen(options.studies, options.quick), []
    left = sum(study.minutes for study in studies.values())
    for i, (name, study) in enumerate(studies.items(), 1):
        why, file = lacks(name, options.data_dir), options.out / f"{name}.jsonl"
        left -= study.minutes
        says = f"all take about {study.minutes} minutes, what follows {left}" if why is None else f"skipped: {why}"
        there, every = len(records.read(file)), num_runs(name)
        print(f"[{i}/{len(studies)}] {name}: {study.note}; {there} of {every} runs done; {says}", flush=True)
        if why is None and there < every and not options.list:
            try:
                variants = tuned(name, study, options.out) if name in TRIALS else study.variants()
                declared.run(study, variants, file, at_once=1 if options.quick else declared.num_cores())
            except (SystemExit, ConfigError) as error:  # the others may still run
                print(f"{name} is not whole: {error}", flush=True)
                broken.append(name)
    if broken:
        raise SystemExit(f"not whole: {', '.join(broken)}; the same command goes on")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
