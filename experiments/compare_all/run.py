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
from importlib.util import find_spec
from pathlib import Path

HERE = Path(__file__).parent
SHARED = HERE.parents[2] / "shared" / "data"
sys.path[:0] = [str(HERE), str(HERE.parent)]

import blocks
import records

from gnnpar.comm.world import num_cores
from gnnpar.launch.emulated.paced import trial
from gnnpar.settings import ConfigError
from studies import QUICK, SEEDS, STUDIES, TUNED, Study

paced = functools.cache(trial)  # whether links can be shaped here


def lacks(study: Study, data_dir: Path) -> str | None:
    """Why a study cannot run here."""
    if study.files and not (data_dir / study.files).exists():
        return f"no {data_dir / study.files}; --data-dir DIR or GNNPAR_DATA names the folder of raw files"
    if study.paced and (said := paced()).startswith("no: "):
        return f"launch=paced {said.removeprefix('no: ')}"
    if study.trials and find_spec("tune") is None:
        return "compare_all/tune.py is not there"
    return None


def run(study: Study, *, out: Path, data_dir: Path) -> None:
    """Its lines in out/NAME.jsonl, those that are not there yet."""
    file = out / f"{study.name}.jsonl"
    common = [*study.common, f"data_dir={data_dir}"] if study.files else study.common
    if study.blocks:
        blocks.run(study.jobs, blocks=range(study.blocks), common=common, out=file, whole=True)
        return
    jobs = tuned(study, out) if study.trials else study.jobs
    seeds = f"seed={','.join(map(str, range(study.seeds)))}"
    at_once = num_cores() if study.seeds >= SEEDS else 1  # a rehearsal's few runs end before processes have started
    blocks.sweep(jobs, common=[*common, seeds], out=file, failures=True, at_once=at_once)


def tuned(study: Study, out: Path) -> blocks.Jobs:
    """Every job as it comes and with what its trials chose (rule 14); they have a seed that is not reported."""
    import tune

    jobs = {}
    for name, overrides in study.jobs.items():
        model = name.split()[0]
        print(f"{name}: {study.trials} trials of conf/tune/{model}.yaml", flush=True)
        job, file = [*study.common, *overrides], out / f"{study.name}_trials.jsonl"
        chosen = tune.tuned(job, space=model, trials=study.trials, seed=0, out=file)
        jobs |= {name: overrides, f"{name}{TUNED}": [*overrides, *(o for o in chosen if o not in job)]}
    return jobs


def chosen(names: Sequence[str], quick: bool) -> list[Study]:
    known = {study.name: study for study in (QUICK if quick else STUDIES)}
    unknown = [name for name in names if name not in known]
    if unknown:
        raise SystemExit(f"there is no study {', '.join(unknown)}; there are {', '.join(known)}")
    return [known[name] for name in names or known]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="default: all")
    parser.add_argument("--quick", action="store_true", help="a rehearsal of ten minutes, whose figures say nothing")
    parser.add_argument("--list", action="store_true", help="say what would run, and run nothing")
    parser.add_argument("--out", type=Path, default=HERE, help="folder of the raw lines (beside this file)")
    parser.add_argument("--data-dir", type=Path, default=Path(os.environ.get("GNNPAR_DATA", SHARED)))
    options = parser.parse_args()
    os.environ.setdefault("GNNPAR_SESSION", uuid.uuid4().hex[:12])
    options.out.mkdir(parents=True, exist_ok=True)
    studies, broken = chosen(options.studies, options.quick), []
    for i, study in enumerate(studies):
        why = lacks(study, options.data_dir)
        there = len(records.read(options.out / f"{study.name}.jsonl"))
        after = sum(other.minutes for other in studies[i + 1 :])
        left = f"all take about {study.minutes} minutes, what follows {after}" if why is None else f"skipped: {why}"
        print(
            f"[{i + 1}/{len(studies)}] {study.name}: {study.about}; {there} of {study.runs} runs done; {left}",
            flush=True,
        )
        if why is None and not options.list:
            try:
                run(study, out=options.out, data_dir=options.data_dir.resolve())
            except (SystemExit, ConfigError) as error:  # the others may still run
                print(f"{study.name} is not whole: {error}", flush=True)
                broken.append(study.name)
    if broken:
        raise SystemExit(f"not whole: {', '.join(broken)}; the same command goes on")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
