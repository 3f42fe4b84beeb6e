"""Which body an op takes, what the environment forces, and one signature for all bodies."""

import inspect
import os
import pkgutil
import subprocess
import sys

import pytest
import torch

import gnnpar_kernels
from gnnpar_kernels import dispatch, implementations
from gnnpar_kernels.dispatch import functions_of
from gnnpar_kernels.triton_tuning import interpreting

OPS = sorted(vars(functions_of("naive")))
FOLDERS = {name for _, name, is_package in pkgutil.iter_modules(gnnpar_kernels.__path__) if is_package}
BODIES = ("cpu", "triton")
interpreting_at_import = interpreting()


def _call():
    return gnnpar_kernels.spmm(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 2), num_rows=1)


def test_every_op_is_public_and_every_folder_is_a_kernel():
    assert set(OPS) <= set(gnnpar_kernels.__all__)
    assert sorted(implementations()) == OPS
    assert {getattr(gnnpar_kernels, name).__module__ for name in OPS} == {f"gnnpar_kernels.{name}" for name in FOLDERS}


def test_bodies_that_are_absent_are_the_specification():
    """Every op has code of its own on a CPU and in Triton but these: a body that is not found would pass unnoticed."""
    naive = functions_of("naive")
    absent = {body: {op for op in OPS if getattr(functions_of(body), op) is getattr(naive, op)} for body in BODIES}
    of_cpu = {"extremum_finish", "gather_rows", "scatter_add_rows_"}
    assert absent == {"cpu": of_cpu, "triton": {"dense", "extremum_finish"}}


def test_an_op_without_a_specification_is_refused(monkeypatch):
    monkeypatch.setattr(dispatch, "_packages", {})
    with pytest.raises(ValueError, match=r"gnnpar_kernels.spmm.naive does not define product: write its specification"):
        dispatch.register("product", "gnnpar_kernels.spmm")


def test_triton_is_not_imported_on_a_cpu():
    """Nor by a call: its import takes seconds, and the package may be absent."""
    program = (
        "import sys, torch, gnnpar_kernels as k\n"
        "k.spmm(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 2), num_rows=1)\n"
        "k.implementations('cpu')\n"
        "print([name for name in sys.modules if name == 'triton' or 'gnnpar_kernels' in name and 'triton' in name])"
    )
    environment = {k: v for k, v in os.environ.items() if k not in ("TRITON_INTERPRET", dispatch.VARIABLE)}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "[]\n", "")


@pytest.mark.parametrize("name", OPS)
def test_bodies_share_name_and_signature(name):
    specification = getattr(functions_of("naive"), name)
    for functions in (*map(functions_of, BODIES), gnnpar_kernels):
        body = getattr(functions, name)
        assert body.__name__ == name
        assert inspect.signature(body) == inspect.signature(specification)
    assert specification.__doc__


def test_device_decides(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert implementations("cpu")["spmm"].body == "cpu"
    assert implementations("cpu")["gather_rows"] == ("naive", "already the fast one on a CPU")
    assert implementations("cuda")["spmm"] == ("triton", "compiled for this GPU at the first call")
    assert implementations("cuda")["extremum_finish"] == ("naive", "already the fast one on cuda")
    assert implementations("mps")["spmm"].body == "naive"


def test_without_the_triton_package(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    monkeypatch.setattr(dispatch.importlib.util, "find_spec", lambda name: None)
    assert implementations("cuda")["spmm"] == ("naive", "the triton package is not installed: plain torch on cuda")
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    with pytest.raises(ValueError, match="GNNPAR_KERNELS=triton, but the triton package is not installed"):
        implementations("cuda")


def test_triton_is_forced_on_a_cpu_only_when_interpreting(kit, monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(ValueError, match=r"the tensors are on cpu \(TRITON_INTERPRET=1 runs the kernels on a CPU"):
        _call()
    if interpreting_at_import:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
        assert torch.equal(_call(), torch.ones(1, 2))
        assert implementations("cpu")["spmm"] == ("triton", "GNNPAR_KERNELS=triton")


def test_naive_is_forced_at_every_call(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "naive")
    assert {choice.body for choice in implementations().values()} == {"naive"}
    assert torch.equal(_call(), torch.ones(1, 2))


def test_what_cannot_be_forced_is_one_clear_error(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(ValueError, match="not one of naive, cpu, triton"):
        _call()
    with pytest.raises(ValueError, match="not one of naive, cpu, triton"):
        implementations()


def test_cpu_body_is_not_forced_on_a_gpu(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "cpu")
    with pytest.raises(ValueError, match="on cuda"):
        implementations("cuda")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_ops_run_in_inference_mode(kit, dtype):
    graph = kit.degree_graph()
    x, a_src, a_dst = (torch.randn(n, 2, dtype=dtype) for n in (graph.num_src, graph.num_src, graph.num_dst))
    indptr, indices, *_ = graph.forward
    ids = torch.arange(graph.num_src)

    def run():
        z = x.clone()
        state = gnnpar_kernels.attend(indptr, indices, z[..., None], a_src, a_dst, slope=0.2, num_rows=graph.num_dst)
        return (
            gnnpar_kernels.spmm(indptr, indices, z, num_rows=graph.num_dst),
            *gnnpar_kernels.extremum(indptr, indices, z, ids, num_rows=graph.num_dst),
            *gnnpar_kernels.attend_finish(state),
            gnnpar_kernels.dropout(z, ids, p=0.5, key=1),
        )

    expected = run()
    with torch.inference_mode():
        actual = run()
    for got, reference in zip(actual, expected, strict=True):
        assert torch.equal(got, reference)
