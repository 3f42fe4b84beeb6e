"""Every metric name, its unit and its meaning, in one table. metrics.jsonl uses only these names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import UnionType
from typing import NamedTuple

from gnnpar.files import Json, JsonObject


class Key(NamedTuple):
    unit: str
    meaning: str
    kind: type | UnionType = int | float


PHASES = ("compute", "sample", "encode", "exposed_wire", "exposed_skew", "bubble", "reduce", "other")
BYTE_PHASES = ("forward", "backward", "remat", "push", "stage", "reduce", "assign", "pairs", "global")
RARE_PHASES = ("pairs", "global")  # link prediction, and sums over all nodes: shown only if used

LOSS = "loss/train"
KEYS: dict[str, Key] = {
    "epoch": Key("1", "epoch of the row, from 0"),
    LOSS: Key("1", "training loss of the epoch, mean over all training nodes, before the step"),
    "optim/lr": Key("1", "learning rate of the epoch"),
    "time/epoch_seconds": Key("s", "wall time of the epoch's training window on the slowest rank"),
    "time/timed": Key(
        "0|1",
        "1: counts in the timing statistics; 0: a probe, the memory profile or the capture of a CUDA graph ran inside",
    ),
    "time/train_seconds": Key("s", "sum of time/epoch_seconds so far"),
    **{f"time/{p}_seconds": Key("s", f"part of the epoch in phase {p}, on the slowest rank") for p in PHASES},
    "time/comm_total_seconds": Key("s", "time with a transfer in flight, overlapped or not, on the slowest rank"),
    "time/slowest_rank": Key("1", "the rank that the time/ figures are of"),
    "time/cpu_seconds": Key("s", "CPU time of the epoch, a list by rank", list),
    "time/cold_load_seconds": Key("s", "reading the dataset, in row 0"),
    "time/cold_plan_seconds": Key("s", "strategy.plan without partitioning, in row 0"),
    "time/cold_partition_seconds": Key("s", "partitioning (or reading it from the cache) in strategy.plan, in row 0"),
    "time/cold_shard_seconds": Key("s", "cutting and sending shards and building the engine, in row 0"),
    "comm/total_bytes": Key("B", "sent in the epoch, summed over ranks: the sum of the phases"),
    **{f"comm/{p}_bytes": Key("B", f"sent in phase {p}, summed over ranks") for p in BYTE_PHASES},
    "comm/layer_bytes": Key("B", "sent by the aggregations of a layer, summed over ranks: {layer: bytes}", dict),
    "comm/metadata_bytes": Key("B", "the part of comm/total_bytes that is no payload, counted again"),
    "comm/wire_bytes": Key("B", "launch=paced: sent in the epoch by the hosts' interfaces, headers included"),
    "comm/messages": Key("1", "point-to-point messages of the epoch, summed over ranks"),
    "comm/total_bytes_so_far": Key("B", "sum of comm/total_bytes so far"),
    "metric/name": Key(
        "", "accuracy, roc_auc, micro_f1, r2, mrr, hits@K or that of task.metric, in rows with an evaluation", str
    ),
    "metric/train": Key("task metric", "the task's metric with exact logits, training nodes; null for pairs"),
    "metric/val": Key("task metric", "the same on validation nodes, or pairs"),
    "metric/test": Key("task metric", "the same on test nodes, or pairs"),
    "metric/more": Key("task metric", "of a task with several metrics all of them: {metric: {split: value}}", dict),
    "time/evaluate_seconds": Key("s", "wall time of the evaluation; not part of the epoch"),
    "fidelity/cosine": Key("1", "cosine of the strategy's gradient and the exact one at the same weights"),
    "fidelity/relative_error": Key("1", "norm of their difference over the norm of the exact gradient"),
    "fidelity/worst_layer": Key("", "the layer with the largest relative error", str),
    "fidelity/worst_relative_error": Key("1", "the relative error of that layer"),
    "fidelity/layers": Key("1", "the same two by layer: {layer: [cosine, relative error]}", dict),
    "assign/bits": Key(
        "1", "rows by bits for each exchange, in rows of epochs that chose: {exchange: {bits: rows}}", dict
    ),
    "assign/mean_bits": Key("bit", "mean over all numbers sent, of the same choice, metadata not counted"),
    "assign/numbers": Key("1", "numbers sent that the choice is for"),
    "assign/variance": Key("1", "weighted variance that the choice predicts, by exchange", dict),
    "assign/seconds": Key("s", "time of each exchange that the choice predicts, by exchange", dict),
    "assign/objective": Key("1", "what was minimised, by exchange", dict),
    "time/assign_seconds": Key("s", "choosing bits, traffic included; part of the epoch"),
    "cover/halo_rows": Key("1", "halo=cover: remote rows that the ranks read, in row 0"),
    "cover/rows": Key("1", "those that travel, in row 0"),
    "cover/partial_rows": Key("1", "destinations folded where their sources are, in row 0"),
    "time/cover_seconds": Key("s", "finding the cover, part of time/cold_shard_seconds, in row 0"),
    "sample/steps": Key("1", "steps of the epoch: batches of training nodes"),
    "sample/nodes": Key("1", "nodes of the subgraphs of the epoch's steps, on rank 0: a node counts once a step"),
    "sample/edges": Key("1", "edges of these subgraphs"),
    "sample/sampler": Key("", "what drew neighbours: pyg_lib, torch_sparse or own", str),
    "profile/hash": Key("", "sha256 of the profile that decides on numbers, in row 0", str),
    "memory/peak_bytes": Key("B", "largest allocation during the profiled epoch, a list by rank", list),
    "memory/pinned_bytes": Key(
        "B", "most memory of the host pinned for a GPU in the profiled epoch, a list by rank", list
    ),
    "memory/peak_rss_bytes": Key("B", "largest resident set so far, a list by rank; for information", list),
    "memory/live_bytes": Key("B", "live tensors by category, of the rank with the largest peak", dict),
    "system/load": Key("1", "load average of the host over the last minute, in the first and the last row"),
}


LOWER_IS_BETTER = ("mae", "rmse")
"""Metrics that are better when lower; all others are better when higher."""


def goodness(name: str, value: float) -> float:
    """Return a metric's value with the sign that makes higher better."""
    return -value if name in LOWER_IS_BETTER else value


ALWAYS = (LOSS, "time/timed", "time/epoch_seconds", "time/train_seconds", "comm/total_bytes", "comm/total_bytes_so_far")
"""Names in every row of a run; only the loss may be null."""


def is_complete(row: Mapping[str, object]) -> bool:
    """Return True for a row with all of ALWAYS; lines of a study have only some of them."""
    return all(name in row and (name == LOSS or row[name] is not None) for name in ALWAYS)


def is_valid(row: JsonObject) -> bool:
    """Return True if every number is finite and every value is null or of the kind in KEYS."""
    kinds = all(value is None or isinstance(value, KEYS[name].kind) for name, value in row.items() if name in KEYS)
    return kinds and is_finite(row)


def readable(tree: Json) -> Json:
    """Replace numbers that JSON lacks (NaN, inf) by null."""
    if isinstance(tree, dict):
        return {name: readable(value) for name, value in tree.items()}
    if isinstance(tree, list):
        return [readable(value) for value in tree]
    return tree if is_finite(tree) else None


def is_finite(tree: object) -> bool:
    """Return True if every number in a tree is finite; Python's JSON also reads NaN and Infinity."""
    if isinstance(tree, (Mapping, list)):
        return all(map(is_finite, tree.values() if isinstance(tree, Mapping) else tree))
    return not isinstance(tree, float) or math.isfinite(tree)


def check(row: dict) -> None:
    """Raise AssertionError for a name that is not in the table."""
    unknown = sorted(set(row) - set(KEYS))
    assert not unknown, f"metrics without an entry in track/keys.py: {unknown}"
