"""The ranks of a run as plain data: a launcher makes `World`, `Host` and `Outcome`, and training reads them. This
module is below both, so that neither imports the other."""

from __future__ import annotations

import os
import re
import sys
import traceback
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from typing import Literal, Protocol

import psutil

from gnnpar.comm import allocator
from gnnpar.files import JsonDict

How = Literal["alone", "threads", "processes", "joined"]
Status = Literal["completed", "failed", "interrupted"]

# The queue of a shaped link holds the burst and this many seconds; excess packets are dropped and sent again. Three
# senders to one receiver at 0.2 Gbit/s sent 14 % again with 0.02 s at the switch, and 0.2 % with 0.1 s.
LATENCY_SECONDS = 0.02
SWITCH_LATENCY_SECONDS = 0.1
_WORKSPACE = "CUBLAS_WORKSPACE_CONFIG"


@dataclass(frozen=True, kw_only=True)
class Links:
    """Emulated hosts of one machine, the rates of their links, and the host of every rank.

    host_gbps: 10^9 bit/s of each host's link, in each direction. link_gbps: [i][j] limit from host i to host j; None:
    no further limit. burst_kib: KiB that an idle link passes unpaced. dilation D: ranks get 1 / D of their
    cores, links carry 1 / D of these rates, and a second lasts D seconds. speeds: share of its cores that each rank
    gets; (): all.
    """

    host_gbps: tuple[float, ...]
    link_gbps: tuple[tuple[float | None, ...], ...] | None = None
    host_of: tuple[int, ...] = ()
    burst_kib: int = 256
    dilation: float = 1.0
    speeds: tuple[float, ...] = ()

    @property
    def num_hosts(self) -> int:
        return len(self.host_gbps)

    def gbps(self, source: int, target: int) -> float:
        """Return the rate of the path between two hosts without other traffic."""
        link = self.link_gbps[source][target] if self.link_gbps else None
        both = min(self.host_gbps[source], self.host_gbps[target])
        return both if link is None else min(both, link)

    def is_first_of_host(self, rank: int) -> bool:
        return self.host_of.index(self.host_of[rank]) == rank

    def describe(self) -> str:
        """Return a description such as '2 hosts x 1 Gbit/s'."""
        rates = sorted(set(self.host_gbps))
        rate = f"{rates[0]:g}" if len(rates) == 1 else f"{rates[0]:g} to {rates[-1]:g}"
        dilated = f", dilated {self.dilation:g} times" if self.dilation != 1 else ""
        speeds = f", ranks of {', '.join(f'{s:g}' for s in self.speeds)} times the speed" if self.speeds else ""
        links = ", links by topology" if self.link_gbps else ""
        return f"{self.num_hosts} hosts x {rate} Gbit/s{links}{speeds}{dilated}"

    def cores(self, threads: int) -> tuple[float, ...]:
        """Return the cores of this machine for each rank of `threads` threads; (): no limit."""
        if self.dilation == 1 and not self.speeds:
            return ()
        return tuple(threads * speed / self.dilation for speed in self.speeds or (1.0,) * len(self.host_of))

    def facts(self) -> JsonDict:
        """Return the facts on links for result.json, before they are made."""
        rates = self.host_gbps
        return {
            "hosts": self.num_hosts,
            "host_of": list(self.host_of),
            "rates": {
                "host_gbps": rates[0] if len(set(rates)) == 1 else list(rates),
                "link_gbps": self.link_gbps and [list(row) for row in self.link_gbps],
                "burst_kib": self.burst_kib,
                "latency_seconds": LATENCY_SECONDS,
                "switch_latency_seconds": SWITCH_LATENCY_SECONDS,
            }
            | ({"dilation": self.dilation} if self.dilation != 1 else {})
            | ({"speeds": list(self.speeds)} if self.speeds else {}),
            "reached_gbps": None,
        }


@dataclass(frozen=True, kw_only=True)
class World:
    """The ranks of a run and their resources.

    how: alone (one rank in this process), threads, processes (started here), joined (started by torchrun or Slurm).
    links: the shaped links between the ranks of launch=paced; None: the machine's own. jobs_at_once: runs that a
    sweep's launcher runs concurrently on this machine, including this one.
    """

    how: How
    size: int
    local_size: int
    threads_per_rank: int
    cores: int
    device: Literal["cpu", "cuda"]
    backend: Literal["gloo", "nccl", "threads", "none"]
    links: Links | None = None
    jobs_at_once: int = 1
    deterministic: bool = False
    tf32: bool = False

    def prepare(self) -> None:
        """Set torch and the allocator in the process of a rank. cuBLAS reads its workspace once."""
        import torch

        torch.set_num_threads(self.threads_per_rank)
        set_default_types()
        if self.deterministic:
            torch.use_deterministic_algorithms(True)
            os.environ.setdefault(_WORKSPACE, ":4096:8")
        _set_matmul_precision("high" if self.tf32 else "highest", ["tf32" if self.tf32 else "ieee", "ieee"])
        allocator.keep_freed()

    @property
    def dilation(self) -> float:
        """Real seconds per second of the ranks' clocks."""
        return 1.0 if self.links is None else self.links.dilation

    @property
    def num_threads(self) -> int:
        """Number of threads of all runs on this machine."""
        return self.jobs_at_once * self.local_size * self.threads_per_rank

    @property
    def oversubscribed(self) -> bool:
        """Whether there are more threads than physical cores: bytes, memory and accuracy are valid, times are not."""
        return self.num_threads > self.cores * self.dilation


def set_default_types() -> None:
    """Set float32 as the default type, and no autocast, in this thread."""
    import torch

    torch.set_default_dtype(torch.float32)
    for device in filter(torch.is_autocast_enabled, ("cpu", "cuda")):
        torch.set_autocast_enabled(device, False)


def _set_matmul_precision(legacy: str, precisions: Sequence[str]) -> None:
    """Set float32 products on GPUs and CPUs. torch's legacy switch comes first: it raises if the newer ones differ."""
    import torch

    torch.set_float32_matmul_precision(legacy)
    for switch, precision in zip(_matmul_switches(), precisions, strict=True):
        if switch.fp32_precision != precision:
            switch.fp32_precision = precision


class _Switch(Protocol):
    fp32_precision: str


def _matmul_switches() -> tuple[_Switch, _Switch]:
    import torch

    matmul = attrgetter("matmul")
    return matmul(torch.backends.cuda), matmul(torch.backends.mkldnn)


@contextmanager
def restored_torch_settings() -> Generator[None]:
    """Restore torch's settings of `World.prepare` at the end."""
    import torch

    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    warns, dtype = torch.is_deterministic_algorithms_warn_only_enabled(), torch.get_default_dtype()
    autocast = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    workspace = os.environ.get(_WORKSPACE)
    legacy, precisions = "highest", [switch.fp32_precision for switch in _matmul_switches()]
    with suppress(RuntimeError):  # the newer switches differ
        legacy = torch.get_float32_matmul_precision()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        if torch.are_deterministic_algorithms_enabled() != deterministic:  # setting it imports torch's compiler
            torch.use_deterministic_algorithms(deterministic, warn_only=warns)
        _set_matmul_precision(legacy, precisions)
        torch.set_default_dtype(dtype)
        for device in autocast:
            torch.set_autocast_enabled(device, True)
        os.environ.pop(_WORKSPACE, None)
        os.environ.update({} if workspace is None else {_WORKSPACE: workspace})


@contextmanager
def torch_defaults() -> Generator[None]:
    """Within the context: float32, gradients, and tensors on the CPU by default, for any settings of the caller."""
    if (torch := sys.modules.get("torch")) is None:
        yield
        return
    on_cpu = nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")
    with restored_torch_settings(), torch.inference_mode(False), torch.enable_grad(), on_cpu:
        set_default_types()
        yield


@dataclass(frozen=True, kw_only=True)
class Host:
    """Services of a rank's launcher.

    stop_asked: whether to end after this epoch, with a checkpoint. others_failed: whether another rank has failed.
    sent_bytes: bytes sent by the interface of the rank's host; None: not counted by this rank.
    """

    stop_asked: Callable[[], bool] = lambda: False
    others_failed: Callable[[], bool] = lambda: False
    sent_bytes: Callable[[], int] | None = None


class Interrupted(KeyboardInterrupt):
    """Raised when the work ended regularly after `Host.stop_asked`."""


@dataclass(frozen=True)
class Outcome:
    """The end of a run. error: one line. quiet: another rank of this host reports it."""

    status: Status
    error: str | None = None
    traceback: str = ""
    quiet: bool = False

    @property
    def exit_code(self) -> int:
        return 0 if self.status == "completed" else 1


class RunHooks:
    """Hooks of the caller of `launch`, called in the process that starts the ranks, or in joined rank 0.

    run_dir: the folder of the run.
    """

    run_dir: Path

    def agreed(self) -> Mapping[str, str]:
        """Return settings that must be equal on all joined ranks. Called on every rank."""
        return {}

    def folder_error(self, folder: Path) -> str:
        """Return an error line if this rank does not see `folder`, rank 0's run_dir, or ''. Called on every rank."""
        return ""

    def before_start(self, restarts: int) -> None:
        """Prepare for the first rank. restarts: number of restarts by torchrun so far."""

    def on_links(self, reached_gbps: Sequence[float]) -> None:
        """Record the rates of the shaped links: 10^9 bit/s of payload from each host to the next."""

    def on_restart(self, restarts: int) -> str:
        """Prepare for a restart of all ranks. Return 'from ...', the place where they resume."""
        return "from the beginning"

    def on_lost(self, line: str, folder: Path) -> str:
        """Add advice to the line of a lost rank. folder: rank 0's run_dir. Called on every rank."""
        return line

    def on_end(self, outcome: Outcome) -> Outcome:
        """Finish after the last rank. Return the result of `launch`."""
        return outcome


def reason_of(error: BaseException) -> str:
    """Return 'ValueError: text' in one line, with the place in the user's code."""
    text = " ".join(str(error).split())
    line = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return line if _SHOWS in line else line + _own_line(error)


def _own_line(error: BaseException) -> str:
    """Return ' (mynet.py:14 in forward; ...)', the innermost frame of the user's code; '' if gnnpar itself refuses."""
    while error.__cause__ is not None:
        error = error.__cause__
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if not f.filename.startswith((_OURS, _PYTHON, "<")) and not _PACKAGES.search(f.filename)]
    if not own or (isinstance(error, ValueError) and frames[-1].filename.startswith(_OURS)):
        return ""
    place = f"{Path(own[-1].filename).name}:{own[-1].lineno} in {own[-1].name}"
    return f" ({place}; {_SHOWS})"


_SHOWS = "GNNPAR_TRACEBACK=1 shows all of it"
_OURS, _PYTHON = f"{Path(__file__).parents[1]}{os.sep}", f"{Path(os.__file__).parent}{os.sep}"
_PACKAGES = re.compile("site-packages|dist-packages|gnnpar_kernels")


def num_cores() -> int:
    """Return the physical cores that this process may use."""
    physical = psutil.cpu_count(logical=False) or psutil.cpu_count() or 1
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else physical  # Linux only
    return max(1, min(physical, allowed))
