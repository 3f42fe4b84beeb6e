"""Studies from nothing, on one commit: those that the decision table of README.md rests on, and all others.

    python experiments/all_studies.py compare [--list]     # make compare: what the table rests on
    python experiments/all_studies.py rest [--list]        # make studies: the others
    python experiments/all_studies.py bandwidth sar_speed  # these; experiments/reproduce.sh NAME takes one

They run in a copy of this folder without lines, OUT/experiments: what is committed stays as it is, and none of it
counts as done. Stopped with Ctrl-C and started again, the same command goes on: a study that has ended is marked,
others go on with what is not there. Tables and figures of a study then lie in its folder of the copy (report.md,
figure.svg), and whether its headline numbers lie where expected.toml has them is printed.
"""

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parent
SHARED = ROOT.parent / "shared" / "data"
LINES = ("*.jsonl", "*.xz", "*.csv", "*.svg", "*.npz", "*.part", "rates.json", "__pycache__", "smoke*", "quick*")
REPORT = "report.md"


@dataclass(frozen=True, kw_only=True)
class Study:
    """`runs`: arguments of run.py, a call each; `report`: of report.py, None where another study of the same
    folder calls it. `minutes`: on two cores, by what its lines took. `root`: it needs root and iproute2, or cgroups.
    `quiet`: its times count, so that nothing else may run."""

    name: str
    minutes: int
    runs: Sequence[Sequence[str]] = ((),)
    report: Sequence[str] | None = ()
    root: bool = False
    quiet: bool = True
    folder: str = ""  # of the study; empty: its name

    @property
    def where(self) -> str:
        return self.folder or self.name

    def ended(self, experiments: Path) -> Path:
        """The file that marks it."""
        return experiments / self.where / f"ended.{self.name}"


def command(folder: Path, what: str) -> list[str]:
    """What runs a study, or reports it: its own program, or the one of studies that are files."""
    own = folder / f"{what}.py"
    return [sys.executable, *([str(own)] if own.exists() else [str(folder.parent / "declared.py"), what, folder.name])]


TIMED = ("speed", "paced")  # of compare_all
TRAINED = ("accuracy", "rivals", "verdict", "deep", "sbm_products", "sbm_reddit", "cora", "citeseer", "computers", "cs")
TRAINED += ("squirrel", "tolokers")
BESIDE = ("target", "target_paced", "tuned")  # of compare_all, which the decision table does not read
CORE = ("--of", "exact", "drop", "gnnpipe", "gnnpipe, exact start", "adaqp")  # of convergence, before its others
CONVERGED = ("--of", "gcnii", "resgcn", "exact", "gnnpipe", "drop")

# those whose times count come last: others may use the machine until then
COMPARE = [
    Study(name="compare_all_accuracy", minutes=315, folder="compare_all", runs=(TRAINED,), report=None, quiet=False),
    Study(name="gnnpipe_convergence", minutes=35, runs=(CONVERGED,), quiet=False),
    Study(name="planner_scale", minutes=5, quiet=False),
    Study(name="sar_memory", minutes=15, quiet=False),
    Study(name="compare_all", minutes=125, runs=(TIMED,), report=("--page", "."), root=True),
    Study(name="four_machines", minutes=25, root=True),
    Study(name="bandwidth", minutes=25, root=True),
    Study(name="adaqp_throughput", minutes=15, root=True),
    Study(name="gnnpipe_speed", minutes=45, root=True),
    Study(name="planner_accuracy", minutes=20, root=True),
    Study(name="planner_choice", minutes=20, runs=((), ("--pool",)), root=True),
    Study(name="sar_speed", minutes=10),
    Study(name="sar_out_of_core", minutes=5, root=True),
    Study(name="rivals", minutes=30, runs=(("bytes", "memory", "times"),), root=True),
]
REST = [
    Study(name="adaqp_rivals", minutes=15, root=True),
    Study(
        name="compare_all_beside", minutes=145, folder="compare_all", runs=(BESIDE,), report=("--page", "."), root=True
    ),
    Study(name="gnnpipe_convergence_all", minutes=85, folder="gnnpipe_convergence", quiet=False),
    Study(name="rivals_accuracy", minutes=105, folder="rivals", runs=(("accuracy",),), quiet=False),
    Study(name="convergence", minutes=6000, runs=(CORE, ()), quiet=False),
    Study(name="scale", minutes=600, runs=(("papers",), ("memory",), ("times",), ("dilated",)), root=True),
    Study(name="adaqp_accuracy", minutes=20, quiet=False),
    Study(name="adaqp_knobs", minutes=50, root=True),
    Study(name="bf16", minutes=25, quiet=False),
    Study(name="cover", minutes=60, root=True),
    Study(name="dilation", minutes=20, root=True),
    Study(name="epoch_speed", minutes=5),
    Study(name="gnnpipe_memory", minutes=5, quiet=False),
    Study(name="gnnpipe_simulator", minutes=25, root=True),
    Study(name="gnnpipe_volume", minutes=10, quiet=False),
    Study(name="layer_speed", minutes=10),
    Study(name="many_machines", minutes=60, root=True),
    Study(name="mixed_speeds", minutes=30, root=True),
    Study(name="planner_search", minutes=10),
    Study(name="pyg_models", minutes=90, quiet=False),
    Study(name="random_nodes", minutes=200, runs=((), ("--times",))),
    Study(name="row_order", minutes=5),
    Study(name="sar_fused", minutes=10, root=True),
    Study(name="shards_memory", minutes=15, quiet=False),
    Study(name="strong_scaling", minutes=10),
    Study(name="sufficient_factors", minutes=10, root=True),
    Study(name="transformers", minutes=180, quiet=False),
    Study(name="typed_debian", minutes=25, quiet=False),
    Study(name="typed_wordnet", minutes=60, quiet=False),
]
# without a program, beside code of others, or on a GPU: their pages say how
ELSEWHERE = ("ablation", "accuracy", "bench_peers", "beside_the_originals", "one_gpu")
LISTS = {"compare": COMPARE, "rest": REST}


def copied(out: Path) -> Path:
    """This folder without its lines in `out`, brought up to date; lines that are there stay."""
    folder = out / "experiments"
    for compiled in list(folder.rglob("__pycache__")):
        shutil.rmtree(compiled)
    for program in list(folder.rglob("*.py")):
        if not (HERE / program.relative_to(folder)).exists():  # of an earlier version
            program.unlink()
    shutil.copytree(HERE, folder, ignore=shutil.ignore_patterns(*LINES), dirs_exist_ok=True)
    tests = out / "tests"  # graphs of some studies are made by modules of the tests
    if not tests.is_symlink():
        tests.symlink_to(ROOT / "tests", target_is_directory=True)
    return folder


def run(study: Study, experiments: Path) -> bool:
    """Whether it ended."""
    folder = experiments / study.where
    for arguments in study.runs:
        ended = subprocess.run([*command(folder, "run"), *arguments], check=False).returncode
        if ended < 0:  # by a signal: whoever ended it means all of them
            raise SystemExit(f"{study.name} was ended by signal {-ended}; the same command goes on with it")
        if ended:
            return False
    if study.report is not None and not reported(study, study.report, experiments):
        return False
    study.ended(experiments).touch()
    return True


def reported(study: Study, arguments: Sequence[str], experiments: Path) -> bool:
    """Whether its tables are written."""
    folder = experiments / study.where
    told = subprocess.run(
        [*command(folder, "report"), *arguments], stdout=subprocess.PIPE, text=True, check=False, cwd=folder
    )
    if told.returncode:
        return False
    (folder / REPORT).write_text(told.stdout, encoding="utf-8")
    expected = [sys.executable, str(experiments / "check.py"), "expected", study.where]
    subprocess.run(expected, input=told.stdout, text=True, check=False)  # what lies outside is said, and no failure
    return True


def listed(studies: Sequence[Study], experiments: Path) -> None:
    for study in studies:
        done = study.ended(experiments).exists()
        needs = [what for what, asked in (("root", study.root), ("a quiet machine", study.quiet)) if asked]
        print(f"{study.name}: {study.minutes} minutes, needs {' and '.join(needs) or 'nothing'}{', done' * done}")
    print(f"{sum(study.minutes for study in studies) / 60:.1f} hours in all")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("studies", nargs="+", metavar="STUDY", help=f"{', '.join(LISTS)}, or names")
    parser.add_argument("--list", action="store_true", help="say what would run and how long, and run nothing")
    parser.add_argument("--out", type=Path, help="folder of the copy (outputs/compare, outputs/studies)")
    options = parser.parse_args()
    known = {study.name: study for study in (*REST, *COMPARE)}
    if unknown := [name for name in options.studies if name not in known and name not in LISTS]:
        raise SystemExit(f"there is no study {', '.join(unknown)}; there are {', '.join(sorted(known))}")
    studies = [study for name in options.studies for study in (LISTS.get(name) or [known[name]])]
    out = options.out or ROOT / "outputs" / ("compare" if options.studies == ["compare"] else "studies")
    if options.list:
        listed(studies, out / "experiments")
        return
    os.environ.setdefault("GNNPAR_DATA", str(SHARED))
    out.mkdir(parents=True, exist_ok=True)
    experiments, broken = copied(out.resolve()), []
    for i, study in enumerate(studies):
        after = sum(other.minutes for other in studies[i + 1 :])
        state = "done" if study.ended(experiments).exists() else f"{study.minutes} minutes"
        print(f"[{i + 1}/{len(studies)}] {study.name}: {state}, then {after}", flush=True)
        if state != "done" and not run(study, experiments):
            print(f"{study.name} is not whole", flush=True)
            broken.append(study.name)
    if broken:
        raise SystemExit(f"not whole: {', '.join(broken)}; the same command goes on")


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        raise SystemExit("stopped; the same command goes on from here") from None
