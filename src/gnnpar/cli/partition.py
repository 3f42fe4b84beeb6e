"""`gnnpar partition`: cut a dataset into shards on disk, a folder per rank, for graphs larger than memory."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from rich.progress import BarColumn, Progress, TaskID, TaskProgressColumn, TextColumn, TimeElapsedColumn

from gnnpar.config.compose import compose
from gnnpar.config.inputs import as_value, group_of
from gnnpar.files import JsonDict
from gnnpar.paths import expanded
from gnnpar.settings import ConfigError, Settings, config_errors
from gnnpar.track.console import num_bytes, say, stdout

if TYPE_CHECKING:
    from gnnpar.data.stored import Stored

USAGE = """usage: gnnpar partition dataset=NAME world_size=N out=FOLDER [partition=NAME] [model=NAME] [key=value ...]

Cuts a dataset into N shards in FOLDER for `gnnpar train shards=FOLDER`: every rank maps its own files and never loads
the whole graph. dataset=folder and dataset=rmat are read in chunks, with partition=ldg, fennel, random or range in
O(nodes) memory; metis and vertex cuts (ne, hdrf, dbh, random_edges) hold all edges. Other datasets are loaded whole.
Overrides are those of `gnnpar train`; model= matters only for attention dropout, which needs edge ids in the shards.
"""


def run(argv: list[str]) -> int:
    """Write the shards. Return 0."""
    if not argv or {"-h", "--help"} & set(argv):
        sys.stdout.write(USAGE)
        return 0 if argv else 2
    outs = [a.removeprefix("out=") for a in argv if a.startswith("out=")]
    if len(outs) != 1 or not outs[0]:
        raise ConfigError(f"out=FOLDER is given {len(outs)} times; name one folder for the shards")
    overrides = [a for a in argv if not a.startswith("out=")]
    if asked := next((o for o in overrides if group_of(o) in ("shards", "plan") or o.startswith("-")), None):
        raise ConfigError(f"{asked}: gnnpar partition takes out=FOLDER and overrides of dataset, partition, world_size")
    settings = compose(overrides)
    with config_errors():
        out = expanded(outs[0])
    if settings.task.decoder is not None:
        raise ConfigError(
            f"task={settings.names.get('task')} splits the edges of a whole graph before it is cut: leave it out here; "
            "shards cannot train it"
        )
    if out.exists():
        raise ConfigError(f"out={out} is there already; remove it, or name another folder")
    try:
        with config_errors():
            cut_into(settings, out)
    except OSError as error:
        raise ConfigError(f"out={out}: {error.strerror or error} ({error.filename})") from error
    return 0


def cut_into(settings: Settings, out: Path) -> None:
    """Read, partition and write. Scratch files are in the parent folder of `out`."""
    from gnnpar.data.stored import Stored, Streamed
    from gnnpar.partition.on_disk import write_shards
    from gnnpar.partition.partition import EdgePartitioner, partition, partition_edges
    from gnnpar.partition.vertex_cut import vertex_cut_statistics
    from gnnpar.training.plans import log_problems, partition_cache

    began, parts = time.perf_counter(), settings.world_size
    out.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.", suffix=".partial")
    with scratch as folder, progress() as on_progress:
        on_progress("read", 0.0)
        dataset = settings.read_dataset()
        if isinstance(dataset, Streamed):
            graph = dataset.stored(settings.data_dir, settings.seed, Path(folder), on_progress)
        else:
            graph = Stored.of(dataset.load(settings.data_dir, settings.seed))
        on_progress("partition", 0.0)
        by, cache = settings.partition, partition_cache(settings)
        part_of, vertex_cut = partition(graph, parts, by=by, cache=cache, say=log_problems), None
        in_memory = isinstance(by, EdgePartitioner) or not isinstance(settings.dataset, Streamed)  # all edges
        if in_memory:
            edge_part_of = partition_edges(graph, parts, part_of, by=by, cache=cache, say=log_problems)
            vertex_cut = vertex_cut_statistics(graph.edge_index, part_of, edge_part_of, parts)
        manifest = write_shards(
            graph,
            part_of,
            parts,
            out,
            edge_ids=needs_edge_ids(settings, graph),
            setup=setup_of(settings),
            on_progress=on_progress,
        )
    counts, size = manifest.statistics, sum(facts.nbytes for facts in manifest.files.values())
    say(f"{manifest.name}: {manifest.num_nodes} nodes, {manifest.num_edges} edges, {manifest.num_features} features")
    for p in range(parts):
        say(
            f"  part {p}: {counts['nodes'][p]} nodes, {counts['edges'][p]} in-edges, {counts['halo_rows'][p]} halo rows"
        )
    say(
        f"{settings.names.get('partition')}: {counts['cut_share']:.1%} of the edges are cut, "
        f"alpha {counts['alpha']:.3f}"
    )
    if vertex_cut is not None:
        say(
            f"as a vertex cut: replication factor {vertex_cut['replication_factor']:.3f}, "
            f"{min(vertex_cut['copied_edges'])} to {max(vertex_cut['copied_edges'])} edges a part"
        )
    command = f"gnnpar train {shlex.quote(f'shards={as_value(str(out))}')}"
    say(f"{num_bytes(size)} in {time.perf_counter() - began:.1f} s  ->  {out}  ({command})")


def needs_edge_ids(settings: Settings, graph: Stored) -> bool:
    """Return True if the model reads edge ids, or the graph has attributes, which edge ids order."""
    from gnnpar.data.tasks import make_task

    task = make_task(graph.task, graph.num_classes)
    if graph.edge_sizes.attr:
        return True
    return settings.model.on(graph.edge_sizes).build(graph.num_features, task.out_dim, seed=0).needs_edge_ids


def setup_of(settings: Settings) -> dict[str, JsonDict]:
    """Return the settings that a run from the shards inherits. Graph and split were drawn with this command's seed."""
    groups = ("dataset", "partition")
    names = {group: settings.names.get(group, group) for group in groups}
    dataset = dict(settings.resolved["dataset"])
    drawn = [key for key in ("graph_seed", "split_seed", "split_index") if dataset.get(key, 0) is None]
    dataset |= dict.fromkeys(drawn, settings.seed)
    return {"names": names, "dataset": dataset, "partition": settings.resolved["partition"]}


@contextmanager
def progress() -> Iterator[Callable[[str, float], None]]:
    """Yield on_progress(stage, share), which draws a bar per stage on a terminal, else prints a line per stage."""
    began, bars = time.perf_counter(), dict[str, TaskID]()
    columns = (TextColumn("{task.description:14}"), BarColumn(24), TaskProgressColumn(), TimeElapsedColumn())
    with Progress(*columns, console=stdout(), disable=not stdout().is_terminal) as shown:

        def on_progress(stage: str, share: float) -> None:
            if stage not in bars:
                for bar in bars.values():
                    shown.update(bar, completed=1.0)
                    shown.stop_task(bar)
                bars[stage] = shown.add_task(stage, total=1.0)
                if shown.disable:
                    say(f"{time.perf_counter() - began:6.1f} s  {stage}")
            shown.update(bars[stage], completed=share)

        yield on_progress
        for bar in bars.values():
            shown.update(bar, completed=1.0)
