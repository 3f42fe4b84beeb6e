"""result.json: a pure function of what was known beforehand, plan.json, the rows of metrics.jsonl and how it ended.

Rank 0 writes it at its end, and whoever supervises the ranks where the run did not complete: also after a rank was
killed, from the epochs that were finished.
"""

from __future__ import annotations

import functools
import json
import os
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

from gnnpar.files import JsonDict, JsonObject, read_json, write_json_whole
from gnnpar.placement import Plan
from gnnpar.track.jsonl import read_rows
from gnnpar.track.keys import BYTE_PHASES, PHASES, goodness, is_finite, is_whole
from gnnpar.training.result.header import WARMUP_EPOCHS

if TYPE_CHECKING:
    import jsonschema

Status = Literal["completed", "failed", "interrupted", "skipped"]
Row = JsonObject
FILE = "result.json"
LIVE = ("parameters", "optimizer", "features", "structure", "activations", "halo", "history", "host")


def schema_path() -> Path:
    """The JSON Schema of result.json, shipped beside this module."""
    return Path(__file__).with_name("result.schema.json")


def write_result(run_dir: Path, header: Row, status: Status, error: str | None) -> JsonDict:
    """Build result.json from the files of a run folder and write it."""
    rows = [row for row in read_rows(run_dir) if is_whole(row)]  # of a run that somebody else began, not all may be
    result = build_result(header, _plan_in(run_dir), rows, status, error)
    load = {"before": header["load_before"], "after": os.getloadavg()[0]}
    result["load"] = load | ({"others": header["others"]} if "others" in header else {})
    write_json_whole(run_dir / FILE, result)
    return result


def _plan_in(run_dir: Path) -> JsonDict | None:
    """plan.json of a run folder; None where there is none, or what another program left under its name."""
    try:
        return Plan.data(run_dir / "plan.json")
    except ValueError:
        return None


def forget(run_dir: Path) -> None:
    """Remove what an earlier run in the same folder found out."""
    for name in (FILE, "trace.json", "schedule.svg", "schedule.txt"):
        (run_dir / name).unlink(missing_ok=True)


def read_result(run_dir: Path) -> JsonDict | None:
    """What rank 0 wrote, if it did; a file that is none counts as none. `valid_result` asks for more."""
    try:
        result = read_json(run_dir / FILE)
    except (OSError, ValueError):
        return None
    known = result.get("status") in get_args(Status)
    return result if known and isinstance(result.get("error", 0), (str, type(None))) else None


def valid_result(run_dir: Path) -> JsonDict | None:
    """The same, by its schema: what stands in it is used, and anybody may have written it."""
    result = read_result(run_dir)
    return None if result is None or fault(result) else result


def fault(result: JsonObject) -> str:
    """Where a result.json is not as the schema says, and why; empty: it is. Fields that were added to schema 1 may be
    missing, and unknown ones are left alone: gnnpar of another version wrote them."""
    for error in _validator().iter_errors(result):
        if error.validator == "additionalProperties":
            continue
        if error.validator == "required" and error.message.split("'")[1] in _ADDED:
            continue
        place = ".".join(str(each) for each in error.absolute_path)[:80]
        return f"{place or 'it'}: {' '.join(error.message.split())[:160]}"
    for name in result.keys() - _OF_ANY_SIZE:
        if not is_finite(result[name]):
            return f"{name}: a number is not finite"
    return ""


_OF_ANY_SIZE = {"fidelity", "assignment", "settings"}
"""Where a gradient of zeros, or what codecs and users write, may be none."""


_ADDED = {"session", "block", "load", "fidelity", "assignment", "predicted", "paced", "restarts", "code"}


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(schema_path().read_text(encoding="utf-8")))


def build_result(header: Row, plan: Row | None, rows: Sequence[Row], status: Status, error: str | None) -> JsonDict:
    """Schema 1. Figures that no epoch supports are null."""
    replanned = ((plan or {}).get("predicted") or {}).get("replanned")
    begun = header.get("begun_otherwise", {}).get("epochs", 0)
    since = max(replanned["epoch"] if replanned else 0, begun)
    timed, warmup = timed_rows([row for row in rows if row["epoch"] >= begun], since=since)
    of_plan = [row for row in rows if row["epoch"] >= since]
    hashes = (plan or {}).get("hashes", {})
    copied = (
        "strategy",
        "exactness",
        "model",
        "dataset",
        "world_size",
        "threads_per_rank",
        "cores",
        "oversubscribed",
        "transport",
        "provenance",
        "session",
        "block",
        "seed",
        "device",
        "epochs",
    )
    return {
        "schema": 1,
        "status": status,
        **{name: header[name] for name in copied},
        **({"verified": header["verified"]} if "verified" in header else {}),
        "epochs_done": len(rows),
        "restarts": header.get("restarts", 0),
        **({"begun_otherwise": header["begun_otherwise"]} if "begun_otherwise" in header else {}),
        "loss": {"first": rows[0]["loss/train"] if rows else None, "last": rows[-1]["loss/train"] if rows else None},
        "metric": metric(rows),
        "epoch_seconds": epoch_seconds(timed, warmup),
        "train_wall_seconds": rows[-1]["time/train_seconds"] if rows else 0.0,
        "cold_start_seconds": cold_start(rows[0] if rows else {}),
        "breakdown_seconds": {name: _mean(timed, f"time/{name}_seconds") or 0.0 for name in (*PHASES, "comm_total")},
        "bytes_per_epoch": bytes_per_epoch(timed),
        "bytes_by_layer": bytes_by_layer(timed),
        "error": error,
        "cpu_seconds": _mean_list(timed, "time/cpu_seconds"),
        "memory_bytes": memory(of_plan),
        "time_to_target": time_to_target(rows, header["target"]),
        "fidelity": fidelity(rows),
        "assignment": assignment(rows),
        "predicted": predicted(plan, timed, of_plan),
        "hashes": {
            "graph": hashes.get("graph", ""),
            "split": hashes.get("split", ""),
            "partition": hashes.get("partition", ""),
            "config": header["config_hash"],
            "profile": hashes.get("profile", "") or (rows[0].get("profile/hash", "") if rows else ""),
        },
        "paced": links(header["paced"], timed),
        "settings": header["settings"],
        "versions": header["versions"],
        "hardware": header["hardware"],
        "commit": header["commit"],
        "code": {},  # schema 1 requires it
    }


def predicted(plan: Row | None, timed: Sequence[Row], rows: Sequence[Row]) -> JsonDict | None:
    """What a planner said of the plan, and by how much the epoch and the peak were above it (-0.1: 10 % below)."""
    predicted = (plan or {}).get("predicted")
    if not predicted:
        return None
    median, peaks = epoch_seconds(timed, 0)["median"], memory(rows)["peak"]
    peak = max(predicted["peak_bytes"])
    return {
        "label": predicted.get("label", ""),
        "epoch_seconds": predicted["epoch_seconds"],
        "peak_bytes": peak,
        "epoch_error": median / predicted["epoch_seconds"] - 1.0 if median is not None else None,
        "peak_error": max(peaks) / peak - 1.0 if peaks else None,
        "replanned": predicted.get("replanned"),
    }


def timed_rows(rows: Sequence[Row], *, since: int = 0) -> tuple[list[Row], int]:
    """Rows after the warm-up in which nothing but training ran, and the warm-up; all rows where none are left.

    `since`: the epoch in which the plan began that the run ended with.
    """
    rows = [row for row in rows if row["epoch"] >= since] or rows
    late = [row for row in rows if row["epoch"] >= since + WARMUP_EPOCHS and row["time/timed"]]
    if late:
        return late, WARMUP_EPOCHS
    early = [row for row in rows if row["time/timed"]]
    return early or list(rows), 0


def epoch_seconds(timed: Sequence[Row], warmup: int) -> JsonDict:
    seconds = sorted(row["time/epoch_seconds"] for row in timed)
    if not seconds:
        return dict.fromkeys(("median", "mean", "p20", "p80")) | {"warmup_epochs": warmup, "num_epochs": 0}
    return {
        "median": statistics.median(seconds),
        "mean": statistics.fmean(seconds),
        "p20": _quantile(seconds, 0.2),
        "p80": _quantile(seconds, 0.8),
        "warmup_epochs": warmup,
        "num_epochs": len(seconds),
    }


def epoch_time(result: JsonObject) -> float | None:
    """Seconds an epoch of a result.json: the median, which a burst of other load does not move; the mean where some
    epochs cost more by design, which a median leaves out (protocol, rule 4). None: nothing was timed."""
    return result["epoch_seconds"]["mean" if epochs_differ(result) else "median"]


def epochs_differ(result: JsonObject) -> bool:
    """Whether a run re-assigns bits, refreshes a history or draws batches now and then, by the keys of its strategy, or
    sends more in some epochs than in others (a mean of bytes that is no whole number)."""
    pending: list[object] = [result.get("settings", {}).get("strategy")]
    while pending:
        if isinstance(node := pending.pop(), Mapping):
            if any(node.get(key) not in (None, 1) for key in ("period", "refresh", "batch_size")):
                return True
            pending += node.values()
    sent = result["bytes_per_epoch"]["total"]
    return bool(result.get("assignment")) or sent != int(sent)


def metric(rows: Sequence[Row]) -> JsonDict:
    """Last evaluation, and the one with the best validation value (the first of equals)."""
    evaluated = [row for row in rows if "metric/name" in row]
    last = evaluated[-1] if evaluated else {}
    validated = [row for row in evaluated if row["metric/val"] is not None]
    best = max(validated, key=lambda row: goodness(row["metric/name"], row["metric/val"]), default={})
    return {
        "name": last.get("metric/name"),
        "train": last.get("metric/train"),
        "val": last.get("metric/val"),
        "test": last.get("metric/test"),
        "best_val": best.get("metric/val"),
        "test_at_best_val": best.get("metric/test"),
        "best_epoch": best.get("epoch"),
        **({"more": last["metric/more"]} if "metric/more" in last else {}),
    }


def cold_start(first: Row) -> dict[str, float]:
    names = {"partition": "partition", "plan": "plan", "load": "load", "shard": "shard"}
    cold = {name: first.get(f"time/cold_{key}_seconds", 0.0) for name, key in names.items()}
    return cold | {"profile": 0.0, "compile": 0.0}


def bytes_per_epoch(timed: Sequence[Row]) -> dict[str, int | float]:
    """Exact means; whole numbers wherever every epoch sends the same."""
    names = [name for name in BYTE_PHASES if name != "pairs" or any("comm/pairs_bytes" in row for row in timed)]
    figures = {name: _mean(timed, f"comm/{name}_bytes") or 0 for name in ("total", *names, "metadata")}
    return {name: int(value) if value == int(value) else value for name, value in figures.items()}


def bytes_by_layer(timed: Sequence[Row]) -> list[float]:
    """Means by layer, from 0; a layer that sends nothing in an epoch counts as 0 there."""
    sent = [row.get("comm/layer_bytes") or {} for row in timed]
    num_layers = 1 + max((int(layer) for layers in sent for layer in layers), default=-1)
    return [statistics.fmean(layers.get(str(i), 0) for layers in sent) for i in range(num_layers)]


def links(facts: Row | None, timed: Sequence[Row]) -> JsonDict | None:
    """The shaped links of launch=paced, and what the interface counters of all hosts saw; null for any other launch."""
    if facts is None:
        return None
    wire = _mean(timed, "comm/wire_bytes")
    return {**facts, "wire_bytes_per_epoch": wire, "burst_share": burst_share(facts, wire)}


def burst_share(links: Row, wire_bytes: float | None) -> float | None:
    """One burst of every host over what all hosts send in an epoch: what the links pass unpaced after each pause."""
    if not wire_bytes:
        return None
    return min(1.0, links["rates"]["burst_kib"] * 1024 * links["hosts"] / wire_bytes)


def memory(rows: Sequence[Row]) -> JsonDict:
    profiled = next((row for row in rows if row.get("memory/live_bytes") is not None), {})
    live = profiled.get("memory/live_bytes") or {}
    return {
        "peak": profiled.get("memory/peak_bytes"),
        "peak_rss": rows[-1].get("memory/peak_rss_bytes") if rows else None,
        "live": {name: live.get(name) for name in LIVE},
    }


def time_to_target(rows: Sequence[Row], target: float | None) -> JsonDict:
    """Training seconds and bytes up to the first evaluation that reaches the target; null: never reached."""
    reached = None
    if target is not None:
        evaluated = (row for row in rows if row.get("metric/val") is not None)
        good = (row for row in evaluated if goodness(row["metric/name"], row["metric/val"] - target) >= 0)
        reached = next(good, None)
    return {
        "target": target,
        "seconds": reached and reached["time/train_seconds"],
        "bytes": reached and reached["comm/total_bytes_so_far"],
    }


def fidelity(rows: Sequence[Row]) -> JsonDict | None:
    """Gradient against the exact one at the same weights, over all probes; null without a probe."""
    probes = [row for row in rows if row.get("fidelity/cosine") is not None]
    if not probes:
        return None
    cosines = [row["fidelity/cosine"] for row in probes]
    errors = [row["fidelity/relative_error"] for row in probes]
    worst = max(probes, key=lambda row: row["fidelity/worst_relative_error"])
    return {
        "probes": len(probes),
        "cosine": {"min": min(cosines), "mean": statistics.fmean(cosines), "last": cosines[-1]},
        "relative_error": {"max": max(errors), "mean": statistics.fmean(errors), "last": errors[-1]},
        "worst": {
            "layer": worst["fidelity/worst_layer"],
            "relative_error": worst["fidelity/worst_relative_error"],
            "epoch": worst["epoch"],
        },
        "layers": probes[-1]["fidelity/layers"],
    }


def assignment(rows: Sequence[Row]) -> JsonDict | None:
    """What an adaptive codec chose last, and what choosing took; null where nothing was chosen."""
    chosen = [row for row in rows if "assign/bits" in row]
    if not chosen:
        return None
    last = chosen[-1]
    return {
        "count": len(chosen),
        "epoch": last["epoch"],
        "seconds": statistics.fmean(row["time/assign_seconds"] for row in chosen),
        "mean_bits": last["assign/mean_bits"],
        "bits": last["assign/bits"],
        "predicted_variance": last["assign/variance"],
        "predicted_seconds": last["assign/seconds"],
        "objective": last["assign/objective"],
    }


def _mean(rows: Sequence[Row], key: str) -> float | None:
    values = [row[key] for row in rows if row.get(key) is not None]
    return statistics.fmean(values) if values else None


def _mean_list(rows: Sequence[Row], key: str) -> list[float]:
    lists = [row[key] for row in rows if row.get(key)]
    lists = [each for each in lists if len(each) == len(lists[-1])]  # a resumed run may have had other ranks before
    return [statistics.fmean(column) for column in zip(*lists, strict=True)] if lists else []


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Linear interpolation between the nearest two."""
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
