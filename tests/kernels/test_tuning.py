"""Which tile a kernel takes: from a committed table, never from a clock while training; safe among rank threads."""

import json
import threading
from types import SimpleNamespace

import pytest
import torch
import triton

from gnnpar_kernels import triton_tasks, triton_tuning
from gnnpar_kernels.attend.triton import _fold
from gnnpar_kernels.attend.triton_grad import _pull
from gnnpar_kernels.attend_v2.triton import _fold as fold_v2
from gnnpar_kernels.attend_v2.triton import _pull as pull_v2
from gnnpar_kernels.dispatch import functions_of
from gnnpar_kernels.triton_tuning import Table, Tuned, configs, interpreting
from interpreter import patch_once_a_launch
from kernels.attention import GAT, V2, inputs, run

SMALL, LARGE = configs({"TILE": 512}, {"TILE": 1024})
NAMES = ["x", "acc", "extra", "W", "TILE"]


class _Kernel:
    """A kernel that notes its launches; `block`: called inside each."""

    __name__, __module__, arg_names = "_sum", "gnnpar_kernels.toy.triton", NAMES

    def __init__(self, block=lambda: None):
        self.launches, self.block = [], block

    def __getitem__(self, grid):
        return lambda *args, **kwargs: self._launch(grid, args, kwargs)

    def _launch(self, grid, args, kwargs):
        given = dict(zip(NAMES, args, strict=False)) | kwargs
        given["acc"] += 1
        self.block()
        self.launches.append((given["acc"], given["TILE"], grid))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """An empty table in the place of this machine's, with the kernels compiled as far as Tuned can see."""
    table = Table(tmp_path / "sm_90.json", {"gpu": "a GPU", "triton": "3.6.0"})
    monkeypatch.setattr(triton_tuning, "table", lambda: table)
    monkeypatch.setattr(triton_tuning, "interpreting", lambda: False)
    monkeypatch.delenv("GNNPAR_TUNE", raising=False)
    return table


def _tuned(kernel, key=("W",)):
    return Tuned(kernel, [SMALL, LARGE], key=key, types=["x"], restores=["acc", "extra"])


def _timed(monkeypatch, milliseconds):
    """Calls once per candidate, and gives these times in turn."""
    times = iter(milliseconds)

    def bench(call):
        call()
        return next(times)

    monkeypatch.setattr(triton_tuning, "_milliseconds", bench)


def test_without_an_entry_the_first_candidate_is_taken_and_nothing_is_timed(table, monkeypatch):
    monkeypatch.setattr(triton_tuning, "_milliseconds", lambda call: pytest.fail("timed"))
    kernel = _Kernel()
    _tuned(kernel)[7](torch.ones(2), torch.zeros(1), None, W=128)
    assert [(tile, grid) for _, tile, grid in kernel.launches] == [(512, 7)]
    assert not table.path.exists()


def test_an_entry_is_read_and_zero_ignores_it(table, monkeypatch):
    with table.lock:
        table.add("toy.triton._sum", "W=128 x=float32", {"TILE": 1024, "num_warps": 1})
    kernel = _Kernel()
    for how in ("", "0"):
        monkeypatch.setenv("GNNPAR_TUNE", how)
        _tuned(kernel)[1](torch.ones(2), torch.zeros(1), None, W=128)
    _tuned(kernel)[1](torch.ones(2).double(), torch.zeros(1), None, W=128)
    assert [tile for _, tile, _ in kernel.launches] == [1024, 512, 512]


def test_recording_restores_what_trials_added_to_and_takes_none(table, monkeypatch):
    """GAT's evaluation passes None for the sums of a branch: Triton 3.6's own hooks clone it."""
    monkeypatch.setenv("GNNPAR_TUNE", "record")
    _timed(monkeypatch, [2.0, 1.0])
    kernel, acc = _Kernel(), torch.zeros(1)
    tuned = _tuned(kernel)
    tuned[1](torch.ones(2), acc, None, W=128)
    tuned[1](torch.ones(2), acc, None, W=128)
    assert acc.item() == 2, "two launches, and trials that leave nothing"
    assert [tile for _, tile, _ in kernel.launches] == [512, 1024, 1024, 1024]
    saved = json.loads(table.path.read_text())
    assert saved["chosen"] == {"toy.triton._sum": {"W=128 x=float32": {"TILE": 1024, "num_warps": 1}}}
    assert saved["versions"] == {"gpu": "a GPU", "triton": "3.6.0"}
    assert [(each.tile["TILE"], each.milliseconds) for each in triton_tuning.timings[-2:]] == [(512, 2.0), (1024, 1.0)]


def test_entries_of_other_versions_are_not_mixed_with_new_ones(table):
    with table.lock:
        table.add("toy", "old", {"TILE": 512})
    newer = Table(table.path, {"gpu": "a GPU", "triton": "3.9.0"})
    assert newer.find("toy", "old")
    with newer.lock:
        newer.add("toy", "new", {"TILE": 512})
    assert Table(table.path, newer.versions).chosen == {"toy": {"new": {"TILE": 512}}}


def test_a_tile_that_is_hardly_faster_than_the_first_is_not_taken(table, monkeypatch):
    monkeypatch.setenv("GNNPAR_TUNE", "record")
    _timed(monkeypatch, [1.0, 0.98])
    _tuned(_Kernel())[1](torch.ones(2), torch.zeros(1), None, W=128)
    assert table.find("toy.triton._sum", "W=128 x=float32") == {"TILE": 512, "num_warps": 1}


def test_recording_times_again_what_another_gpu_or_version_measured(table, monkeypatch):
    with table.lock:
        table.add("toy.triton._sum", "W=128 x=float32", {"TILE": 512, "num_warps": 1})
    other = Table(table.path, {"gpu": "another", "triton": "3.6.0"})
    monkeypatch.setattr(triton_tuning, "table", lambda: other)
    monkeypatch.setenv("GNNPAR_TUNE", "record")
    _timed(monkeypatch, [2.0, 1.0])
    _tuned(_Kernel())[1](torch.ones(2), torch.zeros(1), None, W=128)
    assert other.find("toy.triton._sum", "W=128 x=float32") == {"TILE": 1024, "num_warps": 1}


def test_two_rank_threads_launch_at_once_each_with_its_own_tensors(table):
    """triton.autotune keeps the arguments of a launch on itself: one rank's sums became the other's."""
    inside = threading.Barrier(2, timeout=20)
    kernel = _Kernel(block=inside.wait)
    tuned, sums = _tuned(kernel), [torch.zeros(1), torch.zeros(1)]
    threads = [
        threading.Thread(target=tuned[rank], args=(torch.ones(2), sums[rank], None), kwargs={"W": 128})
        for rank in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(grid for _, _, grid in kernel.launches) == [0, 1]
    assert [float(each) for each in sums] == [1.0, 1.0]


def test_of_two_threads_one_measures(table, monkeypatch):
    monkeypatch.setenv("GNNPAR_TUNE", "record")
    trials = []
    monkeypatch.setattr(triton_tuning, "_milliseconds", lambda call: float(len(trials)) + (trials.append(1) or 0))
    tuned = _tuned(_Kernel())
    threads = [
        threading.Thread(target=tuned[1], args=(torch.ones(2), torch.zeros(1), None), kwargs={"W": 128})
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(trials) == 2, "one a candidate"


def test_unknown_names_and_values_are_refused(table, monkeypatch):
    with pytest.raises(ValueError, match=r"_sum has no arguments \['bytes'\]: name its own"):
        _tuned(_Kernel(), key=["bytes"])
    monkeypatch.setenv("GNNPAR_TUNE", "1")
    with pytest.raises(ValueError, match="GNNPAR_TUNE=1 is neither 0 nor record"):
        _tuned(_Kernel())[1](torch.ones(2), torch.zeros(1), None, W=128)


def test_kernels_tune_by_names_that_they_have():
    assert isinstance(_fold, Tuned)
    given = {
        "H": 4,
        "D": 64,
        "BOUND": 0,
        "SPLIT": True,
        "BRANCH": False,
        "x_ptr": SimpleNamespace(dtype=torch.bfloat16),
    }
    assert _fold.shape_class(given) == "H=4 D=64 BOUND=0 SPLIT=True BRANCH=False x_ptr=bfloat16"
    assert all(isinstance(each, triton.Config) for each in _fold.candidates)


MOST = max(len(each.candidates) for each in (_fold, _pull, fold_v2, pull_v2))
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


@pytest.fixture(params=range(1, MOST))
def later_tile(request, monkeypatch):
    """The one after the first, and so on; the last where a kernel has fewer."""
    launched = set()

    def choose(self, given, launch):
        chosen = self.candidates[min(request.param, len(self.candidates) - 1)]
        launched.add((self.name, str(chosen)))
        return chosen

    monkeypatch.setattr(Tuned, "choose", choose)
    monkeypatch.setattr(triton_tasks, "SPLIT", 40)
    patch_once_a_launch()
    return launched


@pytest.mark.skipif(not interpreting(), reason="kernels are compiled here: the table has one tile")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("kind", "heads", "more"), [(GAT, 4, {"branch": True}), (V2, 2, {})], ids=str)
def test_attention_and_its_gradients(kit, later_tile, kind, heads, more, dtype):
    graph = kit.degree_graph()
    operands, grad_out = inputs(kind, graph, heads, 64, dtype=dtype)
    results = [
        run(kind, functions_of(body), graph, [graph], operands, grad_out, None, **more) for body in ("triton", "naive")
    ]
    assert len(later_tile) == 2
    for mine, theirs in zip(*results, strict=True):
        kit.assert_near(mine, theirs, tolerance=TOLERANCE[dtype])
