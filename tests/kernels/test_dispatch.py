"""Which body an op takes, what the environment forces, and one signature for all bodies."""

import inspect

import pytest
import torch

import gnnpar_kernels
from gnnpar_kernels import cpu, dispatch, implementations, naive, triton
from gnnpar_kernels.triton.tuning import interpreting

OPS = sorted(naive.__all__)
interpreting_at_import = interpreting()


def _call():
    return gnnpar_kernels.spmm(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 2), num_rows=1)


def test_every_op_is_public_and_has_every_body():
    assert sorted(cpu.__all__) == sorted(triton.__all__) == OPS
    assert set(OPS) <= set(gnnpar_kernels.__all__)
    assert sorted(implementations()) == OPS


@pytest.mark.parametrize("name", OPS)
def test_bodies_share_name_and_signature(name):
    expected = inspect.signature(getattr(naive, name))
    for body in (getattr(cpu, name), getattr(triton, name), getattr(gnnpar_kernels, name)):
        assert body.__name__ == name
        assert inspect.signature(body) == expected
    assert getattr(naive, name).__doc__


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
    indptr, indices, _, _ = graph.forward
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
