"""The rate of each model's link, at which vanilla alone spends TARGET of its epoch waiting; rates.json keeps them."""

import json
import os
from collections.abc import Mapping
from functools import partial

import blocks
from records import Files

from gnnpar.config.study import Study, merged

TARGET, TOLERANCE = 0.65, 0.05  # vanilla's share of communication


def prepare(files: Files, studies: Mapping[str, Study]) -> None:
    """Set RATE_MODEL, which the study file reads."""
    file = files.folder / "rates.json"
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    vanilla = {each.place: each for each in studies["results"].variants()}
    for model in ("gcn", "sage", "gcnii", "resgcn"):
        if model not in found and not files.smoke:
            print(model, flush=True)
            job = vanilla["paced", model, "vanilla"].overrides
            rate, share = blocks.rate_of(TARGET, TOLERANCE, partial(spent, job))
            found[model] = {"rate": rate, "share": share}
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        os.environ[f"RATE_{model.upper()}"] = f"{found.get(model, {'rate': 1})['rate']:.4f}"


def spent(job: tuple[str, ...], rate: float) -> tuple[float, float, float]:
    """Return seconds of an epoch, in messages, and in the reduction."""
    result = blocks.train(merged(job, [f"launch.rate_gbps={rate:.4f}", "seed=0"]))["result"]["breakdown_seconds"]
    epoch = sum(result[name] for name in result if name != "comm_total")
    return epoch, result["exposed_wire"] + result["exposed_skew"], result["reduce"]
