"""result.json: a pure function of its header (facts of a run before it starts), plan.json, the rows of metrics.jsonl
and the outcome of the run. Rank 0 writes it at the end of the run. If the run did not complete, the process that
supervises the ranks writes it."""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, get_args

import psutil

from gnnpar.files import JsonDict, JsonObject, read_json, write_json_atomic
from gnnpar.partition.manifest import read_manifest
from gnnpar.paths import checkout_dir
from gnnpar.placement import Plan
from gnnpar.settings import Settings, show
from gnnpar.track.jsonl import read_rows
from gnnpar.track.keys import BYTE_PHASES, PHASES, RARE_PHASES, goodness, is_complete, is_finite

if TYPE_CHECKING:
    import jsonschema

    from gnnpar.comm.world import Links, World

Status = Literal["completed", "failed", "interrupted", "skipped"]
Row = JsonObject
FILE = "result.json"
LIVE = ("parameters", "optimizer", "features", "structure", "activations", "halo", "history", "host")
WARMUP_EPOCHS = 5
KERNELS = "GNNPAR_KERNELS"  # gnnpar_kernels.dispatch.VARIABLE; that package imports torch
CHANGES_NUMBERS = ("strategy", "partition", "optim", "precision", "first_layer", "row_order", "seed", "task")
CHANGES_NUMBERS += ("world_size", "tf32", "deterministic", "eval_every", "early_stopping")
"""Settings that change losses, weights or the choice of the best epoch, and may differ on resume."""
CHANGES_TIMES = ("comm", "launch", "device", "threads_per_rank")
"""Settings that change only times."""


def header(settings: Settings, world: World) -> JsonDict:
    """Return the fields of result.json that are known before the run."""
    provenance = "emulated" if world.how == "threads" else "measured" if world.links is None else "paced"
    return {
        "strategy": settings.names.get("strategy", type(settings.strategy).__name__),
        "exactness": sorted(settings.strategy.exactness),
        "model": settings.names.get("model", type(settings.model).__name__),
        "dataset": dataset_name(settings),
        "world_size": world.size,
        "threads_per_rank": world.threads_per_rank,
        "cores": world.cores,
        "oversubscribed": world.oversubscribed,
        "transport": world.backend,
        "provenance": provenance,
        "paced": world.links and world.links.facts(),
        "session": " ".join(filter(None, (settings.study, os.environ.get("GNNPAR_SESSION")))) or None,
        "block": settings.block,
        "seed": settings.seed,
        "device": world.device,
        "epochs": settings.epochs,
        "target": settings.target,
        "config_hash": config_hash(settings, world.links),
        "settings": comparable(settings)
        | ({"launch": {"cuda_graph": True}} if settings.launch.cuda_graph else {})
        | ({"kernels": forced} if (forced := os.environ.get(KERNELS)) else {}),
        "versions": versions(),
        "hardware": hardware(world),
        "commit": commit(),
        "load_before": os.getloadavg()[0],
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),  # set by torchrun
    }


def dataset_name(settings: Settings) -> str:
    """Return dataset.name of the user's graph, else the name of the chosen file of conf/dataset."""
    usual, given = vars(type(settings.dataset)).get("name"), settings.resolved["dataset"].get("name")
    own = given if usual is not None and given != usual else None
    return own or settings.names.get("dataset", type(settings.dataset).__name__)


NOT_COMPARED = ("data_dir", "cache_dir", "tracker", "launch", "block", "checkpoint", "resume", "shards")


def comparable(settings: Settings) -> JsonDict:
    """Return the settings that can change a number."""
    return {k: v for k, v in settings.resolved.items() if k not in NOT_COMPARED}


def config_hash(settings: Settings, links: Links | None) -> str:
    """Hash all settings that can change a number, including times over shaped links."""
    relevant = comparable(settings)
    if links is not None:
        relevant["paced"] = links.facts()
    text = json.dumps({"names": dict(settings.names), **relevant}, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _flat(tree: object, name: str = "") -> Iterator[tuple[str, object]]:
    if isinstance(tree, Mapping) and tree:
        for key, value in tree.items():
            yield from _flat(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, tree


def agreed_on(settings: Settings) -> dict[str, str]:
    """Return settings that must be equal on all ranks: all that can change a number, and library versions."""
    flat = {name: show(value) for name, value in _flat(comparable(settings))}
    folder = settings.resolved.get("shards", {}).get("folder")  # may differ between hosts
    flat["shards"] = "none" if folder is None else read_manifest(Path(str(folder))).fingerprint[:12]
    names = ("gnnpar", "torch", "torch_geometric")
    flat |= {f"the version of {name}": str(installed(name)) for name in names}
    return flat | {KERNELS: os.environ.get(KERNELS, "")}


def versions() -> dict[str, str | None]:
    """Return versions from installed metadata, without imports."""
    return {name: installed(name) for name in ("gnnpar", "torch", "triton")} | {"python": platform.python_version()}


@functools.cache
def installed(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def hardware(world: World) -> str:
    """Return one line: processor, cores, memory, GPUs."""
    gib = psutil.virtual_memory().total / 2**30
    line = f"{processor()}, {world.cores} cores, {gib:.0f} GiB"
    if world.device == "cuda":
        import torch

        line += f", {torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
    return line


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
            return next(names, platform.machine())
    except OSError:
        return platform.processor() or platform.machine()


def commit() -> str | None:
    """Return the commit of the checkout, with + if files differ; None for an installed wheel."""
    root = checkout_dir()
    if root is None:
        return None

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(root), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()

    try:
        differs = git("status", "--porcelain", "--untracked-files=no")
        return git("rev-parse", "--short=12", "HEAD") + ("+" if differs else "")
    except (OSError, subprocess.SubprocessError):
        return None


def schema_path() -> Path:
    """Return the file of the JSON Schema of result.json."""
    return Path(__file__).with_name("result.schema.json")


def write_result(run_dir: Path, header: Row, status: Status, error: str | None) -> JsonDict:
    """Build result.json from the files of a run folder and write it."""
    rows = [row for row in read_rows(run_dir) if is_complete(row)]
    try:
        plan = Plan.data(run_dir / "plan.json")
    except ValueError:  # missing, or unreadable
        plan = None
    result = build_result(header, plan, rows, status, error)
    load = {"before": header["load_before"], "after": os.getloadavg()[0]}
    result["load"] = load | ({"others": header["others"]} if "others" in header else {})
    write_json_atomic(run_dir / FILE, result)
    return result


def remove_results(run_dir: Path) -> None:
    """Remove the results of an earlier run in the same folder."""
    for name in (FILE, "trace.json", "schedule.svg", "schedule.txt"):
        (run_dir / name).unlink(missing_ok=True)


def read_result(run_dir: Path) -> JsonDict | None:
    """Return result.json of a run folder; None if it is missing or has no status."""
    try:
        result = read_json(run_dir / FILE)
    except (OSError, ValueError):
        return None
    known = result.get("status") in get_args(Status)
    return result if known and isinstance(result.get("error", 0), (str, type(None))) else None


def valid_result(run_dir: Path) -> JsonDict | None:
    """Return result.json if it follows its schema."""
    result = read_result(run_dir)
    return None if result is None or fault(result) else result


def fault(result: JsonObject) -> str:
    """Return the first deviation from the schema with its place, else ''. Ignore unknown and later added fields."""
    for error in _validator().iter_errors(result):
        added = error.validator == "required" and error.message.split("'")[1] in _ADDED
        if added or error.validator == "additionalProperties":
            continue
        place = ".".join(str(each) for each in error.absolute_path)[:80]
        return f"{place or 'it'}: {' '.join(error.message.split())[:160]}"
    for name in result.keys() - _OF_ANY_SIZE:
        if not is_finite(result[name]):
            return f"{name}: a number is not finite"
    return ""


_OF_ANY_SIZE = {"fidelity", "assignment", "settings"}
"""Fields that may hold non-finite numbers."""

_ADDED = {"session", "block", "load", "fidelity", "assignment", "predicted", "paced", "restarts", "code"}


@functools.cache
def _validator() -> jsonschema.Draft202012Validator:
    import jsonschema

    return jsonschema.Draft202012Validator(json.loads(schema_path().read_text(encoding="utf-8")))


def build_result(header: Row, plan: Row | None, rows: Sequence[Row], status: Status, error: str | None) -> JsonDict:
    """Build result.json, schema 1. Figures without epochs are null."""
    replanned = ((plan or {}).get("predicted") or {}).get("replanned")
    begun = header.get("begun_otherwise", {}).get("epochs", 0)
    since = max(replanned["epoch"] if replanned else 0, begun)
    timed, warmup = timed_rows([row for row in rows if row["epoch"] >= begun], since=since)
    of_plan = [row for row in rows if row["epoch"] >= since]
    hashes = (plan or {}).get("hashes", {})
    copied = ("strategy", "exactness", "model", "dataset", "world_size", "threads_per_rank", "cores")
    copied += ("oversubscribed", "transport", "provenance", "session", "block", "seed", "device", "epochs")
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
        **{name: header[name] for name in ("settings", "versions", "hardware", "commit")},
        "code": {},  # schema 1 requires it
    }


def predicted(plan: Row | None, timed: Sequence[Row], rows: Sequence[Row]) -> JsonDict | None:
    """Return the prediction of a planner, and the relative errors of epoch and peak (-0.1: 10 % below)."""
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
    """Return the timed rows after the warm-up (all if none are left), and the warm-up. since: the plan's first
    epoch."""
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
    """Return seconds per epoch: the median, or the mean where some epochs cost more by design; None without times."""
    return result["epoch_seconds"]["mean" if epochs_differ(result) else "median"]


def epochs_differ(result: JsonObject) -> bool:
    """Return whether epochs differ in cost by design: by keys of the strategy, or a fractional mean of bytes."""
    pending: list[object] = [result.get("settings", {}).get("strategy")]
    while pending:
        if isinstance(node := pending.pop(), Mapping):
            if any(node.get(key) not in (None, 1) for key in ("period", "refresh", "batch_size")):
                return True
            pending += node.values()
    sent = result["bytes_per_epoch"]["total"]
    return bool(result.get("assignment")) or sent != int(sent)


def metric(rows: Sequence[Row]) -> JsonDict:
    """Return the last evaluation, and the one with the best validation value (the first of equals)."""
    evaluated = [row for row in rows if "metric/name" in row]
    last = evaluated[-1] if evaluated else {}
    validated = [row for row in evaluated if row["metric/val"] is not None]
    best = max(validated, key=lambda row: goodness(row["metric/name"], row["metric/val"]), default={})
    return {
        **{name: last.get(f"metric/{name}") for name in ("name", "train", "val", "test")},
        "best_val": best.get("metric/val"),
        "test_at_best_val": best.get("metric/test"),
        "best_epoch": best.get("epoch"),
        **({"more": last["metric/more"]} if "metric/more" in last else {}),
    }


def cold_start(first: Row) -> dict[str, float]:
    cold = {name: first.get(f"time/cold_{name}_seconds", 0.0) for name in ("partition", "plan", "load", "shard")}
    return cold | {"profile": 0.0, "compile": 0.0}


def bytes_per_epoch(timed: Sequence[Row]) -> dict[str, int | float]:
    """Return exact means; whole numbers if every epoch sends the same."""
    names = [n for n in BYTE_PHASES if n not in RARE_PHASES or any(f"comm/{n}_bytes" in row for row in timed)]
    figures = {name: _mean(timed, f"comm/{name}_bytes") or 0 for name in ("total", *names, "metadata")}
    return {name: int(value) if value == int(value) else value for name, value in figures.items()}


def bytes_by_layer(timed: Sequence[Row]) -> list[float]:
    """Return mean bytes by layer; a layer that sends nothing in an epoch counts as 0."""
    sent = [row.get("comm/layer_bytes") or {} for row in timed]
    num_layers = 1 + max((int(layer) for layers in sent for layer in layers), default=-1)
    return [statistics.fmean(layers.get(str(i), 0) for layers in sent) for i in range(num_layers)]


def links(facts: Row | None, timed: Sequence[Row]) -> JsonDict | None:
    """Return the shaped links of launch=paced with the counters of their interfaces; None for other launches.
    burst_share: the share of an epoch's bytes that links pass in bursts after pauses."""
    if facts is None:
        return None
    wire, burst = _mean(timed, "comm/wire_bytes"), facts["rates"]["burst_kib"] * 1024 * facts["hosts"]
    return {**facts, "wire_bytes_per_epoch": wire, "burst_share": min(1.0, burst / wire) if wire else None}


def memory(rows: Sequence[Row]) -> JsonDict:
    profiled = next((row for row in rows if row.get("memory/live_bytes") is not None), {})
    live = profiled.get("memory/live_bytes") or {}
    return {
        "peak": profiled.get("memory/peak_bytes"),
        "peak_rss": rows[-1].get("memory/peak_rss_bytes") if rows else None,
        "live": {name: live.get(name) for name in LIVE},
    }


def time_to_target(rows: Sequence[Row], target: float | None) -> JsonDict:
    """Return training seconds and bytes until an evaluation reaches the target; None: never."""
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
    """Summarize gradients against exact ones over all probes; None without a probe."""
    probes = [row for row in rows if row.get("fidelity/cosine") is not None]
    if not probes:
        return None
    cosines = [row["fidelity/cosine"] for row in probes]
    errors = [row["fidelity/relative_error"] for row in probes]
    worst = max(probes, key=lambda row: row["fidelity/worst_relative_error"])
    at = {"layer": worst["fidelity/worst_layer"], "relative_error": worst["fidelity/worst_relative_error"]}
    return {
        "probes": len(probes),
        "cosine": {"min": min(cosines), "mean": statistics.fmean(cosines), "last": cosines[-1]},
        "relative_error": {"max": max(errors), "mean": statistics.fmean(errors), "last": errors[-1]},
        "worst": at | {"epoch": worst["epoch"]},
        "layers": probes[-1]["fidelity/layers"],
    }


def assignment(rows: Sequence[Row]) -> JsonDict | None:
    """Return the last choice of an adaptive codec; None without one."""
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
    lists = [each for each in lists if len(each) == len(lists[-1])]  # a resumed run may have had other ranks
    return [statistics.fmean(column) for column in zip(*lists, strict=True)] if lists else []


def _quantile(ordered: Sequence[float], q: float) -> float:
    """Interpolate linearly between the nearest two."""
    position = q * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (position - low) * (ordered[high] - ordered[low])
