"""Runs as pandas tables, for notebooks."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar.report.rows import table_rows
from gnnpar.report.runs import collect, flat, folders_of
from gnnpar.settings import ConfigError
from gnnpar.track.jsonl import FILE, read_rows

if TYPE_CHECKING:
    import pandas as pd


def load(*folders: str | os.PathLike[str], baseline: str = "single", allow_unfair: bool = False) -> pd.DataFrame:
    """One row a run below the folders (patterns such as 'multirun/**' too): the columns of `gnnpar compare`, then
    every setting as settings.KEY. Times in seconds, sizes in bytes; `ratio` = epoch time of the baseline / of the run.
    """
    import pandas as pd

    results = collect([folder for pattern in folders or (".",) for folder in folders_of(pattern)])
    rows = table_rows(results, baseline=baseline, allow_unfair=allow_unfair)
    settings = [flat(result.get("settings", {}), "settings.") for _, result in results]
    return pd.DataFrame([row | setting for row, setting in zip(rows, settings, strict=True)])


def history(run: str | os.PathLike[str]) -> pd.DataFrame:
    """metrics.jsonl of one run folder, one row an epoch; names and units as in gnnpar.track.keys."""
    import pandas as pd

    rows = read_rows(Path(run))
    if not rows:
        raise ConfigError(f"no epoch in {Path(run) / FILE}; give the folder of a run that trained")
    return pd.DataFrame(rows)
