"""Which body an op takes, what the environment forces, and one signature for all bodies."""

import inspect

import pytest
import torch

import gnnpar_kernels
from gnnpar_kernels import cpu, dispatch, implementations, naive

OPS = sorted(naive.__all__)


def _call():
    return gnnpar_kernels.spmm(torch.tensor([0, 1]), torch.tensor([0]), torch.ones(1, 2), num_rows=1)


def test_every_op_is_public_and_has_every_body():
    assert sorted(cpu.__all__) == OPS
    assert set(OPS) <= set(gnnpar_kernels.__all__)
    assert sorted(implementations()) == OPS


@pytest.mark.parametrize("name", OPS)
def test_bodies_share_name_and_signature(name):
    expected = inspect.signature(getattr(naive, name))
    for body in (getattr(cpu, name), getattr(gnnpar_kernels, name)):
        assert body.__name__ == name
        assert inspect.signature(body) == expected
    assert getattr(naive, name).__doc__


def test_device_decides(monkeypatch):
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    assert implementations("cpu")["spmm"].body == "cpu"
    assert implementations("cuda")["spmm"].body == "naive"
    assert "Triton" in implementations("cuda")["spmm"].reason


def test_naive_is_forced_at_every_call(monkeypatch):
    monkeypatch.setenv(dispatch.VARIABLE, "naive")
    assert {choice.body for choice in implementations().values()} == {"naive"}
    assert torch.equal(_call(), torch.ones(1, 2))


@pytest.mark.parametrize(
    ("value", "message"), [("triton", "no Triton kernels yet"), ("fast", "not one of naive, cpu, triton")]
)
def test_what_cannot_be_forced_is_one_clear_error(monkeypatch, value, message):
    monkeypatch.setenv(dispatch.VARIABLE, value)
    with pytest.raises(ValueError, match=message):
        _call()
    with pytest.raises(ValueError, match=message):
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
        state = gnnpar_kernels.attend(
            indptr, indices, z[..., None], a_src, a_dst, slope=0.2, num_rows=graph.num_dst
        )  # fmt: skip
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
