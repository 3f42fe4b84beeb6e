"""Write the folder of a run from its start to its end, and print its lines.

The launcher calls it around its ranks (`RunHooks`); rank 0 writes rows and the result through `tracking`.
"""

from __future__ import annotations

import os
import shlex
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from gnnpar.comm.world import Outcome, RunHooks, World, reason_of
from gnnpar.files import JsonDict, JsonObject, release_room, reserve_room
from gnnpar.settings import Cluster, Settings
from gnnpar.track.console import Console, progress_lines, say
from gnnpar.track.jsonl import FILE, Jsonl, missing_epochs
from gnnpar.track.text import counted
from gnnpar.track.tracker import Tee, Tracker
from gnnpar.training.checkpoint import files as checkpoint
from gnnpar.training.checkpoint import resume
from gnnpar.training.result.result import Status, agreed_on, header, read_result, remove_results, write_result

_BURST_SHARE = 0.05
_BUSY = "busy machine: "
_SPARE_CORES = 0.5  # use of the run's cores by other programs that is tolerated


class RunRecord(RunHooks):
    """The hooks of one run. Pickled with its header for ranks that are processes."""

    def __init__(self, settings: Settings, world: World, run_dir: Path, verified: str = "no") -> None:
        self.settings, self.world, self.run_dir = settings, world, run_dir
        self.header: JsonDict = header(settings, world) | {"verified": verified}
        self._begun = False

    def agreed(self) -> dict[str, str]:
        return agreed_on(self.settings)

    def folder_error(self, folder: Path) -> str:
        """Return why a joined rank cannot write checkpoints into a folder that it cannot see."""
        if not self.settings.checkpoint.keep:
            return ""
        return (
            f"rank {os.environ['RANK']} on {socket.gethostname()} does not see {folder}, the run's folder on rank 0's "
            "host, where every rank leaves its part of a checkpoint: put it on a file system that all hosts share "
            "(hydra.run.dir=FOLDER), or set checkpoint.keep=0"
        )

    def before_start(self, restarts: int) -> None:
        """Clear the folder of a run that begins, or is restarted by torchrun."""
        if self.world.how == "joined":
            self.header["restarts"] = restarts
        for line in remarks(self.settings, self.world):
            say(line)
            if line.startswith(_BUSY):
                self.header["others"] = line.removeprefix(_BUSY)
        remove_results(self.run_dir)
        if not self.header["restarts"]:
            resume.clean(self.settings, self.run_dir)
        reserve_room(self.run_dir)
        if self.world.how == "joined":  # in case a rank is killed; replaced by a later result
            self._write("failed", "ended without saying why")
        self._begun = True

    def on_links(self, reached_gbps: Sequence[float]) -> None:
        self.header["paced"]["reached_gbps"] = list(reached_gbps)

    def on_restart(self, restarts: int) -> str:
        self.header["restarts"] = restarts
        remove_results(self.run_dir)
        reserve_room(self.run_dir)
        saved = checkpoint.folders(self.run_dir)
        return f"from {saved[0]}" if saved else "from the beginning, for there is no checkpoint yet"

    def on_lost(self, line: str, folder: Path) -> str:
        saved = checkpoint.folders(folder)
        left = int(os.environ.get("TORCHELASTIC_MAX_RESTARTS", "0"))
        if left > int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")):
            return f"{line}; torchrun starts all ranks again, from {saved[0].name if saved else 'the beginning'}"
        if not saved:
            return f"{line}; there is no checkpoint yet: start all ranks again (checkpoint.every makes more)"
        again = f"start all ranks again with resume=auto hydra.run.dir={shlex.quote(str(folder))}"
        return f"{line}; the last checkpoint is {saved[0].name}: {again}"

    def on_end(self, outcome: Outcome) -> Outcome:
        """Write the outcome into result.json, unless rank 0 has written that the run completed."""
        there = read_result(self.run_dir)
        complete = there is not None and there["status"] == "completed"
        if complete and not self._begun:  # keep an earlier run's result if ranks fail to connect
            return outcome
        try:
            if there is None or not complete or outcome.status != "completed":
                there = self._write(outcome.status, outcome.error)
        except OSError as error:  # the disk is full, the likely cause of the failure
            reason = f"{self.run_dir / 'result.json'} cannot be written ({error.strerror})"
            return Outcome("failed", "; ".join(filter(None, (outcome.error, reason))), outcome.traceback)
        if line := undercut_by_bursts(there):
            say(line)
        return outcome

    @contextmanager
    def tracking(self, start: resume.Start) -> Iterator[Tracker]:
        """Open metrics.jsonl and the configured tracker; at the end, write the result and pass it to them."""
        settings, found = self.settings, start.found
        if found is not None and start.changed_settings:
            self.header["begun_otherwise"] = {"epochs": found.epoch, "settings": list(start.changed_settings)}
        job = {**self.header, "study": settings.study, "names": dict(settings.names), "resolved": settings.resolved}
        done, source = start.epoch, found and found.run_dir
        rows = Jsonl(self.run_dir, source=source, epochs_done=done, timed=start.same_setup, free=self.free_disk)
        tracker = Tee(trackers=(rows, settings.tracker.build(self.run_dir, settings.epochs, job)))

        def doing() -> str:
            step = "reading and partitioning the graph, and the first epoch"
            step = f"after epoch {rows.count}/{settings.epochs}" if rows.count > done else step
            return step if isinstance(settings.tracker, Console) else ""

        try:
            with progress_lines(doing):
                yield tracker
        except KeyboardInterrupt:
            with suppress(OSError):  # `on_end` writes it again, and reports a failure
                tracker.close(self._write("interrupted", "interrupted by a signal"))
            raise
        except BaseException as error:
            rank = getattr(error, "gnnpar_rank", 0)  # set by comm.threads; exceptions declare no such attribute
            with suppress(OSError):  # keep the first error
                tracker.close(self._write("failed", f"rank {rank}: {reason_of(error)}"))
            raise
        if missing := missing_epochs(self.run_dir, rows.count):
            reason = f"{self.run_dir / FILE} has lost the rows of epochs {missing} while the run lasted"
            tracker.close(self._write("failed", reason))
            raise ValueError(reason)
        tracker.close(self._write("completed", None))

    def free_disk(self) -> bool | None:
        """Free disk space: return True after deleting old checkpoints, False after releasing the reserve, else None."""
        if checkpoint.drop_old(self.run_dir):
            say(f"the disk of {self.run_dir} is full: only the last checkpoint stays")
            return True
        return False if release_room(self.run_dir) else None

    def _write(self, status: Status, reason: str | None) -> JsonDict:
        release_room(self.run_dir)
        return write_result(self.run_dir, self.header, status, reason)


def remarks(settings: Settings, world: World) -> Iterator[str]:
    """Yield one line for each unusual property of this run."""
    if world.how != "joined" and world.size != settings.world_size:
        name = settings.names.get("strategy")
        yield f"strategy={name} runs on {world.size} rank; world_size={settings.world_size} is for others"
    if world.oversubscribed:
        jobs = f" of {world.jobs_at_once} jobs" if world.jobs_at_once > 1 else ""
        ranks = f"{counted(world.size, 'rank')} with {counted(world.num_threads, 'thread')}{jobs}"
        on = counted(world.cores, "core")
        yield f"oversubscribed: {ranks} on {on}: times say nothing about speed; bytes and accuracy stand"
    elif world.jobs_at_once == 1 and (others := contention(world.num_threads, world.cores)):
        yield f"{_BUSY}{others}, and this run needs {world.num_threads}: its times are unreliable"
    if isinstance(settings.topology, Cluster) and world.links is None and world.size > 1:
        yield f"topology={settings.names.get('topology')} names rates of links, which only launch=paced sets"


def contention(num_threads: int, cores: int) -> str:
    """Return 'other programs keep 1.6 of 2 cores busy' if threads would share cores, else ''."""
    busy = psutil.cpu_percent(interval=0.1) / 100 * (os.cpu_count() or 1)
    return f"other programs keep {busy:.1f} of {cores} cores busy" if busy + num_threads > cores + _SPARE_CORES else ""


def undercut_by_bursts(result: JsonObject) -> str:
    """Return a line if links pass much of an epoch in bursts above their rate."""
    share = (result["paced"] or {}).get("burst_share") or 0.0
    if share <= _BURST_SHARE:
        return ""
    kib = result["paced"]["rates"]["burst_kib"]
    passed = f"after every pause links pass {share:.0%} of an epoch's bytes at once (launch.burst_kib={kib})"
    return f"paced: {passed}: its times undercut the rate; send more or lower the burst"
