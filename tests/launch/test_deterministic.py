"""`deterministic=true`: in ranks, torch takes sums in a fixed order, or refuses what has none. And `tf32`."""

import os
from contextlib import contextmanager

import pytest
import torch

from gnnpar.config.compose import compose
from gnnpar.launch import launch
from gnnpar.launch.failures import Stop


class _Work:
    """What each rank finds set: (deterministic, tf32, workspace of cuBLAS)."""

    def __init__(self):
        self.seen = []

    @contextmanager
    def session(self, *, first):
        yield lambda comm, host: self.see()

    def see(self):
        cuda = torch.backends.cuda.matmul.allow_tf32, os.environ.get("CUBLAS_WORKSPACE_CONFIG")
        self.seen.append((torch.are_deterministic_algorithms_enabled(), *cuda))


@pytest.mark.parametrize("asked", ["true", "false"])
@pytest.mark.parametrize("ranks", [1, 2])
def test_deterministic_is_set_in_ranks_and_restored_for_the_caller(asked, ranks, monkeypatch):
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    torch.use_deterministic_algorithms(False)
    settings = compose(["strategy=graph_parallel", "comm=threads", f"world_size={ranks}", f"deterministic={asked}"])
    work = _Work()
    launch._threads(launch.world_of(settings), work, Stop())
    assert work.seen == [(asked == "true", False, ":4096:8" if asked == "true" else None)] * ranks
    assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ, "it is the program's own again"


def test_tf32_is_set_in_ranks_that_ask_for_it():
    work = _Work()
    for asked in ("true", "false"):
        launch._threads(launch.world_of(compose(["strategy=single", f"tf32={asked}"])), work, Stop())
    assert [tf32 for _, tf32, _ in work.seen] == [True, False]
    assert not torch.backends.cuda.matmul.allow_tf32
