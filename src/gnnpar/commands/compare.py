"""`gnnpar compare FOLDER ...`: one row a run, and a ratio only where it is fair (docs: protocol, rule 1)."""

from __future__ import annotations

import argparse
import csv
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.markup import escape
from rich.table import Table

from gnnpar.settings import ConfigError
from gnnpar.track.console import num_bytes, seconds, stdout

Result = Mapping[str, Any]
# what must be equal before two epoch times may form a ratio: name -> path in result.json
FAIR = {
    "graph": ("hashes", "graph"),
    "split": ("hashes", "split"),
    "model": ("model",),
    "model settings": ("settings", "model"),
    "optimizer": ("settings", "optim"),
    "precision": ("settings", "precision"),
    "first_layer": ("settings", "first_layer"),
    "epochs": ("epochs",),
    "eval_every": ("settings", "eval_every"),
    "seed": ("seed",),
    "device": ("device",),
    "hardware": ("hardware",),
    "provenance": ("provenance",),
    "link rates": ("paced", "rates"),
}
COLUMNS: tuple[str, ...] = (
    "strategy", "variant", "exactness", "model", "dataset", "seed", "world_size", "threads_per_rank",
    "epoch_seconds", "ratio", "bytes_per_epoch", "memory_peak_bytes", "metric", "val", "test", "test_at_best_val",
    "provenance", "links", "oversubscribed", "status", "error", "why_no_ratio", "folder",
)  # fmt: skip


def run(argv: list[str]) -> int:
    options = parse(argv)
    results = collect(options.folders)
    rows = table_rows(results, baseline=options.baseline, allow_unfair=options.allow_unfair)
    if options.json:
        stamped = {"baseline": options.baseline, "unfair": options.allow_unfair, "rows": rows}
        sys.stdout.write(json.dumps(stamped, indent=1) + "\n")
    elif options.csv:
        writer = csv.DictWriter(sys.stdout, COLUMNS, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    else:
        show(rows, baseline=options.baseline, allow_unfair=options.allow_unfair)
    return 0


def parse(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser("gnnpar compare", description="A table of runs; folders may hold whole sweeps.")
    parser.add_argument("folders", nargs="+", type=Path, metavar="FOLDER")
    parser.add_argument("--baseline", default="single", help="strategy that epoch times are divided by (single)")
    parser.add_argument("--allow-unfair", action="store_true", help="print ratios between unequal runs, and say so")
    output = parser.add_mutually_exclusive_group()
    output.add_argument("--json", action="store_true", help="the rows as JSON")
    output.add_argument("--csv", action="store_true", help="the rows as CSV")
    return parser.parse_args(argv)


def collect(folders: Sequence[Path]) -> list[tuple[Path, Result]]:
    """Every result.json below the folders, each once, in the order of their paths."""
    found: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give the folder of a run or of a sweep")
        for file in sorted(folder.rglob("result.json"), key=_natural):
            found.setdefault(file.resolve(), file)
    if not found:
        raise ConfigError(f"no result.json below {', '.join(map(str, folders))}; give folders that runs have left")
    return [(file.parent, json.loads(file.read_text(encoding="utf-8"))) for file in found.values()]


def _natural(file: Path) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdigit() else (1, 0, part) for part in file.parts]


def table_rows(
    results: Sequence[tuple[Path, Result]], *, baseline: str, allow_unfair: bool = False
) -> list[dict[str, Any]]:
    """The cells, as they stand in result.json; ratio = epoch time of the baseline / epoch time of the run."""
    bases = [r for _, r in results if r["strategy"] == baseline and r["epoch_seconds"]["median"] is not None]
    everything = [result for _, result in results]
    return [
        _row(folder, result, variant(result, everything), *ratio_of(result, bases, baseline, allow_unfair))
        for folder, result in results
    ]


def variant(result: Result, results: Sequence[Result]) -> str:
    """Those settings of the strategy that differ between its runs here, as one would write them."""
    mine = _flat(_at(result, ("settings", "strategy")) or {})
    others = [_flat(_at(r, ("settings", "strategy")) or {}) for r in results if r["strategy"] == result["strategy"]]
    return " ".join(f"{key}={value}" for key, value in mine.items() if any(o.get(key) != value for o in others))


def _flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings by dotted key; a nested object by the name of its class."""
    flat: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        elif key == "_target_":
            flat[prefix.rstrip(".") or key] = str(value).rpartition(".")[2].lower()
        else:
            flat[f"{prefix}{key}"] = str(value)
    return flat


def ratio_of(result: Result, bases: Sequence[Result], baseline: str, allow_unfair: bool) -> tuple[float | None, str]:
    """How many times faster than the baseline, or why that cannot be said. Among fair baselines the fastest counts."""
    mine = result["epoch_seconds"]["median"]
    if mine is None or result["status"] != "completed":
        return None, f"run {result['status']}"
    bases = [base for base in bases if base["status"] == "completed"]
    if not bases:
        return None, f"no completed run of {baseline}"
    fair = [base for base in bases if not differences(result, base)]
    if not fair and not allow_unfair:
        nearest = min((differences(result, base) for base in bases), key=len)
        return None, f"{baseline} differs in {', '.join(nearest)}"
    fastest = min(base["epoch_seconds"]["median"] for base in fair or bases)
    return fastest / mine, "" if fair else "unfair"


def differences(a: Result, b: Result) -> list[str]:
    """Names of what makes a ratio between two runs unfair. One rank has no link: measured, it is fair beside any."""
    provenances, transports = ({r[name] for r in (a, b)} for name in ("provenance", "transport"))
    skipped = ("provenance", "link rates") if "none" in transports and provenances == {"measured", "paced"} else ()
    return [name for name, path in FAIR.items() if name not in skipped and _at(a, path) != _at(b, path)]


def _at(result: Result, path: Sequence[str]) -> Any:
    value: Any = result
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def _row(folder: Path, result: Result, changed: str, ratio: float | None, why: str) -> dict[str, Any]:
    peak = result["memory_bytes"]["peak"]
    metric = result["metric"]
    values = (
        result["strategy"], changed, " ".join(result["exactness"]), result["model"], result["dataset"],
        result["seed"], result["world_size"],
        result["threads_per_rank"], result["epoch_seconds"]["median"], ratio, result["bytes_per_epoch"]["total"],
        max(peak) if peak else None, metric["name"], metric["val"], metric["test"], metric["test_at_best_val"],
        result["provenance"], links(result), result["oversubscribed"], result["status"], result["error"], why,
        str(folder),
    )  # fmt: skip
    return dict(zip(COLUMNS, values, strict=True))


def links(result: Result) -> str:
    """'2 x 1 Gbit/s' for launch=paced, 'by topology' where links differ, else nothing."""
    paced = result.get("paced")
    if not paced:
        return ""
    rate = paced["rates"]["host_gbps"]
    by_topology = isinstance(rate, list) or paced["rates"]["link_gbps"]
    return f"{paced['hosts']} x " + ("by topology" if by_topology else f"{rate:g} Gbit/s")


def show(rows: Sequence[Mapping[str, Any]], *, baseline: str, allow_unfair: bool) -> None:
    """The table in the terminal. Grey times come from more threads than cores and are no speed."""
    unfair = allow_unfair and any(row["why_no_ratio"] == "unfair" for row in rows)
    table = Table(title="UNFAIR: ratios between runs that differ" if unfair else None, title_style="bold red", box=None)
    texts = ("strategy", "exactness", "model", "dataset", "times", "status")
    shown = (
        "strategy", "exactness", "model", "dataset", "seed", "ranks", "threads", "epoch", f"x {baseline}",
        "sent/epoch", "peak/rank", "val", "test", "times", "status",
    )  # fmt: skip
    for name in shown:
        table.add_column(name, justify="left" if name in texts else "right")
    for row in rows:
        table.add_row(*_cells(row))
    console = stdout()
    if not console.is_terminal:
        console.width = 200
    console.print(table)
    for note in _notes(rows, baseline):
        console.print(escape(note))


def _cells(row: Mapping[str, Any]) -> list[str]:
    time = "-" if row["epoch_seconds"] is None else seconds(row["epoch_seconds"])
    ratio = "-" if row["ratio"] is None else f"{row['ratio']:.2f}"
    grey = row["oversubscribed"] or row["provenance"] == "emulated"
    if grey:
        time, ratio = f"[dim]({time})[/dim]", f"[dim]({ratio})[/dim]"
    if row["why_no_ratio"] == "unfair":
        ratio = f"[red]{ratio}?[/red]"
    failed = row["status"] != "completed"
    return [
        escape(f"{row['strategy']} {row['variant']}".strip()),
        *(
            escape(str(row[name]))
            for name in ("exactness", "model", "dataset", "seed", "world_size", "threads_per_rank")
        ),
        time,
        ratio,
        num_bytes(row["bytes_per_epoch"]),
        "-" if row["memory_peak_bytes"] is None else num_bytes(row["memory_peak_bytes"]),
        *("-" if row[name] is None else f"{row[name]:.4f}" for name in ("val", "test")),
        escape(f"{row['provenance']} {row['links']}".strip()),
        f"[red]{row['status']}[/red]" if failed else row["status"],
    ]


def _notes(rows: Sequence[Mapping[str, Any]], baseline: str) -> list[str]:
    """What the cells cannot say."""
    notes = []
    if any(row["oversubscribed"] or row["provenance"] == "emulated" for row in rows):
        notes.append("(times in parentheses) more threads than cores, or ranks as threads: no statement on speed")
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if row["ratio"] is None and row["status"] == "completed":
            reasons.setdefault(row["why_no_ratio"], []).append(f"{row['strategy']}/{row['model']}")
    notes += [f"no ratio for {', '.join(dict.fromkeys(names))}: {why}" for why, names in reasons.items()]
    notes += [f"{row['strategy']}/{row['model']} {row['status']}: {row['error']}" for row in rows if row["error"]]
    return notes
