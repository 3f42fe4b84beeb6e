"""Jobs of `tuned` as they come and with what their trials chose (protocol, rule 14)."""

from collections.abc import Sequence
from dataclasses import replace

from compare_all.studies import TRIALS, TUNED
from compare_all.tune import tuned
from records import Files

from gnnpar.config.study import Variant, merged


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
