"""Dense layers: products of every body against the plain product, and gradients against F.linear."""

import pytest
import torch
import torch.nn.functional as F

from gnnpar.models.dense import dense

SHAPES = [(1, 1, 1), (70, 9, 3), (70, 33, 40), (300, 130, 64), (5, 64, 200)]  # N, F, O: both sides of a body's limits


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(("rows", "wide", "out"), SHAPES)
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("with_add", [False, True])
def test_products(body, kit, rows, wide, out, dtype, with_bias, with_add):
    x, weight = torch.randn(rows, wide, dtype=dtype), torch.randn(out, wide, dtype=dtype)
    bias = torch.randn(out, dtype=dtype) if with_bias else None
    add = torch.randn(rows, out, dtype=dtype) if with_add else None
    given = None if add is None else add.clone()
    expected = x.double() @ weight.double().T + (0 if bias is None else bias) + (0 if add is None else add)
    got = body.dense(x, weight, bias=bias, add=add)
    assert got.dtype == dtype
    rtol, atol = (1e-5, 1e-4) if dtype == torch.float32 else (1e-12, 1e-12)
    torch.testing.assert_close(got.double(), expected, rtol=rtol, atol=atol)
    assert add is None or given is None or torch.equal(add, given)  # the summand is only read


def test_transposed_and_strided_operands(body):
    """A gradient's product takes the weights transposed, and rows of a wider table."""
    grad, weight = torch.randn(90, 48), torch.randn(48, 64)
    torch.testing.assert_close(body.dense(grad, weight.T), grad @ weight, rtol=1e-5, atol=1e-4)
    table = torch.randn(90, 96)
    torch.testing.assert_close(body.dense(table[:, ::2], weight.T), table[:, ::2] @ weight, rtol=1e-5, atol=1e-4)


def test_no_rows(body):
    assert body.dense(torch.empty(0, 40), torch.randn(64, 40), bias=torch.randn(64)).shape == (0, 64)


KINDS = {"fp32": torch.float32, "fp64": torch.float64}


@pytest.mark.parametrize("dtype", list(KINDS.values()), ids=list(KINDS))
@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("out", [5, 64])
def test_gradients(dtype: torch.dtype, added: bool, out: int) -> None:
    torch.manual_seed(0)
    tensors = [torch.randn(200, 48), torch.randn(out, 48), torch.randn(out)] + [torch.randn(200, out)] * added
    mine = [t.to(dtype).requires_grad_() for t in tensors]
    theirs = [t.double().requires_grad_() for t in tensors]
    pull = torch.randn(200, out)
    got = dense(*mine)
    expected = F.linear(*theirs[:3]) + (theirs[3] if added else 0)
    wanted = torch.autograd.grad((expected * pull).sum(), theirs)
    found = torch.autograd.grad((got * pull).sum(), mine)
    bound = 2e-5 if dtype == torch.float32 else 1e-12
    for a, b in zip((got, *found), (expected, *wanted), strict=True):
        assert float(((a.double() - b).abs().max() / b.abs().max()).detach()) < bound


def test_the_gradient_of_features_is_never_formed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a first layer, whose rows ask for none: one product forward, and one of weights backward."""
    import gnnpar_kernels as kernels

    calls = []
    real = kernels.dense
    monkeypatch.setattr(kernels, "dense", lambda x, w, **more: calls.append(w.shape) or real(x, w, **more))
    weight = torch.randn(64, 48, requires_grad=True)
    torch.autograd.grad(dense(torch.randn(30, 48), weight).sum(), weight)
    assert calls == [(64, 48)]
    torch.autograd.grad(dense(x := torch.randn(30, 48, requires_grad=True), weight).sum(), [x])
    assert calls == [(64, 48)] * 2 + [(48, 64)]
