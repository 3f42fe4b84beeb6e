"""What every worker of bench_peers shares, in any environment: the graph, initial weights, and epochs on demand.

A worker is a process (or several ranks, each one) that loads, and runs one epoch whenever its standard input asks, so
that epochs of different programs take turns on an idle machine. Needs torch alone.
"""

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Epoch = Callable[[], float]
"""Trains one epoch and returns its loss before the step (of mini-batches: the mean)."""


@dataclass(frozen=True)
class Job:
    """What a worker is asked for; the command line holds it as JSON."""

    folder: str
    kind: str
    graph: str
    model: str
    threads: int
    dropout: float = 0.0
    ranks: int = 1
    rank: int = 0

    @property
    def inputs(self) -> dict[str, Any]:
        """edges, x, y, train, part_of; for each model the initial weights of its layers by name, matrices [out, in]."""
        return torch.load(Path(self.folder) / "inputs.pt", weights_only=True)


@torch.no_grad()
def fill(layer: nn.Module, given: Mapping[str, Tensor], names: Mapping[str, str]) -> None:
    """Write initial weights into the parameters of a layer. names: parameter -> name of the weights."""
    parameters = dict(layer.named_parameters())
    for name, source in names.items():
        parameters[name].copy_(given[source].reshape(parameters[name].shape))


def stepper(model: nn.Module, before: Callable[[], object] = lambda: None) -> Callable[[Callable[[], Tensor]], float]:
    """Return a function that makes one step of Adam and returns the loss. before: to be called before the step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, fused=next(model.parameters()).is_cuda)

    def step(loss_of: Callable[[], Tensor]) -> float:
        optimizer.zero_grad()
        loss = loss_of()
        loss.backward()
        before()
        optimizer.step()
        return loss.item()

    return step


def training(model: nn.Module, logits: Callable[[], Tensor], y: Tensor, train: Tensor) -> Epoch:
    """Return whole-graph training as PyG's and DGL's examples write it, on the device of the model."""
    step = stepper(model)
    return lambda: step(lambda: F.cross_entropy(logits()[train], y[train]))


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def resident_peak(epoch: Epoch) -> int:
    """Return the highest resident set in an epoch, sampled: Linux keeps one peak a life."""
    seen, done = [resident()], threading.Event()

    def watch() -> None:
        while not done.wait(0.002):
            seen.append(resident())

    thread = threading.Thread(target=watch)
    thread.start()
    epoch()
    done.set()
    thread.join()
    return max(*seen, resident())


def live_peak(epoch: Epoch) -> int:
    """Bytes that the allocator of torch gave out in an epoch at most, above what was alive before it."""
    with torch.autograd.profiler.profile(use_kineto=True, profile_memory=True) as profile:
        torch._C._autograd._enable_record_function(False)
        try:
            epoch()
        finally:
            torch._C._autograd._enable_record_function(True)
    level = highest = 0
    events = (e for e in profile.kineto_results.events() if e.name() == "[memory]")
    for event in sorted(events, key=lambda e: e.start_ns()):
        level += event.nbytes()
        highest = max(highest, level)
    return highest


def serve(make: Callable[[Job], Epoch]) -> None:
    """Build what runs epochs, then answer each line of the study by one of JSON, until it hangs up."""
    job = Job(**json.loads(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # for what libraries print
    torch.set_num_threads(job.threads)
    bare, epoch = resident(), make(job)

    def tell(answer: object) -> None:
        print(json.dumps(answer), file=answers, flush=True)

    tell("ready")
    for asked in sys.stdin:
        if asked == "epoch\n":
            faults, began = page_faults(), time.perf_counter()
            loss = epoch()
            seconds = time.perf_counter() - began
            tell({"seconds": seconds, "loss": loss, "page_faults": page_faults() - faults})
        else:
            tell({"rss_mib": (resident_peak(epoch) - bare) / 2**20, "live_mib": live_peak(epoch) / 2**20})


def page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
