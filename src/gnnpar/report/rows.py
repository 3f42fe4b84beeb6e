"""One row per run: the cells of the comparison, from result.json."""

from __future__ import annotations

import os
from collections.abc import Hashable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar.files import JsonDict
from gnnpar.report.fairness import Baseline, ratio_of
from gnnpar.report.runs import (
    Result,
    collect,
    configuration_of,
    dataset_of,
    distinguishing_settings,
    exactness_of,
    flat,
    folders_of,
    is_busy,
    links,
    model_of,
)
from gnnpar.settings import ConfigError
from gnnpar.track.jsonl import FILE, read_rows
from gnnpar.training.result.result import epoch_time


def table_rows(results: Sequence[tuple[Path, Result]], *, baseline: str, allow_unfair: bool = False) -> list[JsonDict]:
    """Return the cells; ratio = epoch time of the baseline / epoch time of the run, in the same block and session."""
    everything = [result for _, result in results]
    configurations: dict[Hashable, list[Result]] = {}
    for result in everything:
        configurations.setdefault(configuration_of(result), []).append(result)
    reference = Baseline.of(baseline, everything)
    bases = {key: reference.runs_for(runs) for key, runs in configurations.items()}
    return [
        _row(folder, result, changed, *ratio_of(result, bases[configuration_of(result)], baseline, allow_unfair))
        for (folder, result), changed in zip(results, distinguishing_settings(everything), strict=True)
    ]


def _row(
    folder: Path, result: Result, changed: tuple[str, str], ratio: float | None, why: str, ratio_busy: bool
) -> JsonDict:
    metric, fidelity, peak = result["metric"], result.get("fidelity"), result["memory_bytes"]["peak"]
    return {
        "strategy": result["strategy"],
        "variant": changed[0],
        "settings": changed[1],
        "exactness": exactness_of(result),
        "model": model_of(result),
        "dataset": dataset_of(result),
        "seed": result["seed"],
        "block": result.get("block"),
        "world_size": result["world_size"],
        "threads_per_rank": result["threads_per_rank"],
        "epoch_seconds": epoch_time(result),
        "ratio": ratio,
        "bytes_per_epoch": result["bytes_per_epoch"]["total"],
        "memory_peak_bytes": max((nbytes for nbytes in peak or () if nbytes is not None), default=None),
        "metric": metric["name"],
        "val": metric["val"],
        "test": metric["test"],
        "test_at_best_val": metric["test_at_best_val"],
        "gradient_cosine": fidelity and fidelity["cosine"]["mean"],
        "gradient_error": fidelity and fidelity["relative_error"]["mean"],
        "provenance": result["provenance"],
        "links": links(result),
        "oversubscribed": result["oversubscribed"],
        "status": result["status"],
        "error": result["error"],
        "why_no_ratio": why,
        "busy": is_busy(result),
        "ratio_busy": ratio_busy,
        "folder": str(folder),
    }


if TYPE_CHECKING:
    import pandas as pd


def load(*folders: str | os.PathLike[str], baseline: str = "single", allow_unfair: bool = False) -> pd.DataFrame:
    """Return one row per run below the folders (also patterns, 'multirun/**'): the columns of `gnnpar compare`, then
    every setting as settings.KEY. Times in seconds, sizes in bytes; `ratio` = epoch time of the baseline / of the run.
    """
    import pandas as pd

    results = collect([folder for pattern in folders or (".",) for folder in folders_of(pattern)])
    rows = table_rows(results, baseline=baseline, allow_unfair=allow_unfair)
    settings = [flat(result.get("settings", {}), "settings.") for _, result in results]
    return pd.DataFrame([row | setting for row, setting in zip(rows, settings, strict=True)])


def history(run: str | os.PathLike[str]) -> pd.DataFrame:
    """Return metrics.jsonl of a run folder, one row per epoch; names and units as in gnnpar.track.keys."""
    import pandas as pd

    rows = read_rows(Path(run))
    if not rows:
        raise ConfigError(f"no epoch in {Path(run) / FILE}; give the folder of a run that trained")
    return pd.DataFrame(rows)
