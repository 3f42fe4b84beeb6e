"""Dense layers: values and gradients of the fast body are those of F.linear."""

import pytest
import torch
import torch.nn.functional as F

from gnnpar.models.dense import dense

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
