"""The end, time and memory of each run."""

from collections.abc import Mapping
from typing import Any

import reports
from records import Files


def line(row: Mapping[str, Any], base: Mapping[str, Any]) -> list[str]:
    limit = f"{row['limit_bytes'] / 2**20:.0f} MiB" if row["limit_bytes"] else "none"
    if "losses" not in row:
        end = f"killed by signal {-row['exit']}" if row["exit"] < 0 else f"exit {row['exit']}: {row['said']}"
        return [row["what"], limit, end, *"-----"]
    seconds, slower = row["epoch_seconds"]["mean"], row["epoch_seconds"]["mean"] / base["epoch_seconds"]["mean"]
    peaks = [f"{max(row['memory_bytes'][key]) / 2**20:.0f} MiB" for key in ("peak", "peak_rss")]
    apart = max(abs(a / b - 1) for a, b in zip(row["losses"], base["losses"], strict=True))
    return [row["what"], limit, "completed", f"{seconds:.2f}", f"{slower:.2f}", *peaks, f"{apart:.1e}"]


def report(files: Files) -> None:
    rows = files.read()
    heads = ("run", "limit", "ends", "s an epoch", "times `single`", "peak of tensors", "resident")
    print(reports.table((*heads, "largest loss difference"), [line(row, rows[0]) for row in rows]))
