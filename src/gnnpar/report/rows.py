"""One row a run: the cells of the comparison, as they stand in result.json."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from gnnpar.durable import JsonDict
from gnnpar.report.fairness import ratio_of, timed_runs_of
from gnnpar.report.runs import Result, links, variants

COLUMNS: tuple[str, ...] = (
    "strategy",
    "variant",
    "exactness",
    "model",
    "dataset",
    "seed",
    "block",
    "world_size",
    "threads_per_rank",
    "epoch_seconds",
    "ratio",
    "bytes_per_epoch",
    "memory_peak_bytes",
    "metric",
    "val",
    "test",
    "test_at_best_val",
    "gradient_cosine",
    "gradient_error",
    "provenance",
    "links",
    "oversubscribed",
    "status",
    "error",
    "why_no_ratio",
    "folder",
)


def table_rows(results: Sequence[tuple[Path, Result]], *, baseline: str, allow_unfair: bool = False) -> list[JsonDict]:
    """The cells; ratio = epoch time of the baseline / epoch time of the run, in the same block."""
    everything = [result for _, result in results]
    bases = timed_runs_of(baseline, everything)
    return [
        _row(folder, result, changed, *ratio_of(result, bases, baseline, allow_unfair))
        for (folder, result), changed in zip(results, variants(everything, everything), strict=True)
    ]


def _row(folder: Path, result: Result, changed: str, ratio: float | None, why: str) -> JsonDict:
    peak = result["memory_bytes"]["peak"]
    metric = result["metric"]
    fidelity = result.get("fidelity")
    values = (
        result["strategy"],
        changed,
        " ".join(result["exactness"]),
        result["model"],
        result["dataset"],
        result["seed"],
        result.get("block"),
        result["world_size"],
        result["threads_per_rank"],
        result["epoch_seconds"]["median"],
        ratio,
        result["bytes_per_epoch"]["total"],
        max(peak) if peak else None,
        metric["name"],
        metric["val"],
        metric["test"],
        metric["test_at_best_val"],
        fidelity and fidelity["cosine"]["mean"],
        fidelity and fidelity["relative_error"]["mean"],
        result["provenance"],
        links(result),
        result["oversubscribed"],
        result["status"],
        result["error"],
        why,
        str(folder),
    )
    return dict(zip(COLUMNS, values, strict=True))
