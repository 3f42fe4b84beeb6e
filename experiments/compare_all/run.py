"""The studies beside this file; the rehearsal, which is some of them in small; jobs of `tuned`, as they come and with
what their trials chose (protocol, rule 14)."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import yaml
from compare_all.tune import tuned
from records import Files

from gnnpar.config.study import Variant, merged, read_study

HERE = Path(__file__).parent
NAMES = ["speed", "paced", "accuracy", "rivals", "verdict", "target", "target_paced", "deep"]
NAMES += ["sbm_products", "sbm_reddit", "cora", "citeseer", "computers", "cs", "squirrel", "tolokers", "tuned"]
STUDIES = {name: read_study(HERE / f"{name}.yaml") for name in NAMES}
QUICK = {f"quick_{name}": read_study(HERE / f"quick_{name}.yaml") for name in (*NAMES[:3], "deep", "cora")}
METHODS = list(yaml.safe_load((HERE / "methods.yaml").read_text(encoding="utf-8"))["methods"])  # in every table
TRIALS = {"tuned": 16}  # of every strategy before it trains with what was best
TUNED = ", tuned"  # ends the name of a job with what its trials chose


def num_runs(name: str) -> int:
    """Lines of its file when it is done; a tuned job also has its row as it comes."""
    study = (STUDIES | QUICK)[name]
    return sum(map(study.max_runs, study.variants())) * (2 if name in TRIALS else 1)


def listed(name: str) -> Sequence[str]:
    """The jobs in the order of tables; a tuned one follows the same as it comes. Some studies list them by method."""
    study = (STUDIES | QUICK)[name]
    methods = list(study.methods)
    by_method = {"accuracy": methods, "quick_accuracy": methods, "verdict": ["minibatch"]}.get(name, [])
    variants = sorted(study.variants(), key=lambda v: by_method.index(v.place[-1]) if v.place[-1] in by_method else -1)
    return [f"{variant.name}{end}" for variant in variants for end in ("", *[TUNED] * (name in TRIALS))]


def variants(files: Files, name: str, some: Sequence[Variant]) -> list[Variant]:
    """Return the jobs of a study. Trials have a seed that is not reported."""
    found: list[Variant] = []
    for each in some:
        found.append(each)
        if name in TRIALS:
            model, job = each.place[0], list(each.overrides)
            print(f"{each.name}: {TRIALS[name]} trials of conf/tune/{model}.yaml", flush=True)
            chosen = tuned(job, space=model, trials=TRIALS[name], seed=0, out=files(f"{name}_trials"))
            found.append(replace(each, name=f"{each.name}{TUNED}", overrides=merged(job, chosen)))
    return found
