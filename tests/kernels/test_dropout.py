"""Keyed dropout: one definition in all bodies, the same for any subset of rows, and statistically sound."""

import pytest
import torch

from gnnpar_kernels import fold_key, keep_mask
from gnnpar_kernels.dispatch import functions_of
from gnnpar_kernels.dropout import cpu, naive
from gnnpar_kernels.hashing import threshold
from gnnpar_kernels.triton_tuning import interpreting

KEY = fold_key(0, 1, 2)


def _assert_same(actual, expected, body):
    """Equal bits; but Triton's interpreter cuts bf16 off where GPUs round to nearest: its last bit may differ."""
    assert actual.dtype == expected.dtype and actual.shape == expected.shape
    if expected.dtype == torch.bfloat16 and body is functions_of("triton") and interpreting():
        assert torch.equal(actual == 0, expected == 0)
        torch.testing.assert_close(actual, expected, rtol=2**-7, atol=0.0)
    else:
        assert torch.equal(actual, expected)


SHAPES = [(0, 5), (5, 0), (1, 1), (1000, 7), (200, 128), (3, 70000)]
CASES = [*((key, 100, 77, p) for key in (0, 1, 2**31, 2**32, 2**63, 2**64 - 1, KEY) for p in (0.0, 0.3, 0.999))]
CASES += [(KEY, *shape, 0.3) for shape in SHAPES]


@pytest.mark.parametrize(("key", "rows", "width", "p"), CASES)
def test_masks_agree_bit_for_bit(body, key, rows, width, p):
    ids = torch.randint(-(2**63), 2**63 - 1, (rows,))
    assert torch.equal(body.keep_mask(ids, width, p=p, key=key), naive.keep_mask(ids, width, p=p, key=key))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(), (7,), (3, 4), (0,), (600,)])
def test_dropout_agrees(body, shape, dtype):
    x = torch.randn(51, *shape).to(dtype)
    ids = torch.randperm(10**6)[:51]
    _assert_same(body.dropout(x, ids, p=0.3, key=KEY), naive.dropout(x, ids, p=0.3, key=KEY), body)


def test_dropout_of_non_contiguous_rows(body):
    x = torch.randn(64, 500).t()
    ids = torch.arange(500)
    assert torch.equal(body.dropout(x, ids, p=0.5, key=3), body.dropout(x.contiguous(), ids, p=0.5, key=3))


def test_rows_are_independent_of_their_company(body, monkeypatch):
    ids = torch.randint(0, 2**40, (4000,))
    whole = body.keep_mask(ids, 33, p=0.5, key=KEY)
    subset = torch.randperm(4000)[:123]
    assert torch.equal(body.keep_mask(ids[subset], 33, p=0.5, key=KEY), whole[subset])
    assert torch.equal(body.keep_mask(ids, 20, p=0.5, key=KEY), whole[:, :20])
    monkeypatch.setattr(cpu, "BLOCK", 100)
    assert torch.equal(body.keep_mask(ids, 33, p=0.5, key=KEY), whole)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("first_id", [0, 2**32 - 5000, 2**52])
def test_share_and_independence_of_neighbours(p, first_id):
    ids = torch.arange(first_id, first_id + 10000)
    keep = keep_mask(ids, 64, p=p, key=KEY).double()
    n = keep.numel()
    sigma = (p * (1 - p)) ** 0.5
    assert abs(float(keep.mean()) - (1 - p)) < 5 * sigma / n**0.5
    for mean, count in ((keep.mean(0), 10000), (keep.mean(1), 64)):
        spread = float(((mean - (1 - p)) ** 2).mean())
        assert spread == pytest.approx(sigma**2 / count, rel=0.6 if count == 10000 else 0.08)
    centred = (keep - (1 - p)) / sigma
    others = [
        keep_mask(ids, 64, p=p, key=key).double() for key in (KEY + 1, KEY ^ 2**63, KEY ^ 2**31, fold_key(0, 1, 3))
    ]
    pairs = [(centred[1:], centred[:-1]), (centred[:, 1:], centred[:, :-1]), (centred[1:, 1:], centred[:-1, :-1])]
    pairs += [(centred[64:], centred[:-64]), *((centred, (other - (1 - p)) / sigma) for other in others)]
    pairs += [(centred[1:], ((other - (1 - p)) / sigma)[:-1]) for other in others]
    for a, b in pairs:
        assert abs(float((a * b).mean())) < 5 / n**0.5


def test_every_bit_of_id_and_key_matters():
    base_id, base_key, width = 123456789, KEY, 256
    base = keep_mask(torch.tensor([base_id]), width, p=0.5, key=base_key)
    for bit in range(64):
        flipped = base_id ^ (1 << bit)
        flipped = flipped - 2**64 if flipped >= 2**63 else flipped
        by_id = keep_mask(torch.tensor([flipped]), width, p=0.5, key=base_key)
        by_key = keep_mask(torch.tensor([base_id]), width, p=0.5, key=base_key ^ (1 << bit))
        for other in (by_id, by_key):
            assert 80 < int((other != base).sum()) < 176  # 128 expected, 6 deviations


def test_extreme_probabilities(body):
    ids = torch.arange(1000)
    assert body.keep_mask(ids, 50, p=0.0, key=1).all()
    x = torch.randn(1000, 50)
    assert torch.equal(body.dropout(x, ids, p=0.0, key=1), x)
    for p in (-0.1, 1.0, 2.0):
        with pytest.raises(ValueError, match="outside"):
            body.dropout(x, ids, p=p, key=1)
    assert threshold(0.5) == 0


def test_dropout_is_linear_and_scaled(body):
    ids = torch.arange(2000)
    y = body.dropout(torch.ones(2000, 50), ids, p=0.25, key=9)
    assert y.unique().tolist() == pytest.approx([0.0, 1 / 0.75])
    assert float(y.mean()) == pytest.approx(1.0, abs=0.01)


def test_fold_key_separates():
    keys = {
        fold_key(*parts) for parts in [(), (0,), (0, 0), (1,), (0, 1), (1, 0), (-1,), (2**64,), (2**63,), (1, 0, 0)]
    }
    assert len(keys) == 10
    assert all(0 <= key < 2**64 for key in keys)
    assert fold_key(1, 2, 3) == fold_key(1, 2, 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize(
    "shape", [(0, 4), (5, 0), (64, 32), (3000, 37)]
)  # 64 x 32: whole blocks, 3000 x 37: a last one
def test_a_kept_mask_gives_what_drawing_it_again_gives(body, shape, dtype):
    x, ids = torch.randn(shape).to(dtype), torch.arange(shape[0]) * 7
    keep = naive.keep_mask(ids, shape[1], p=0.3, key=99)
    _assert_same(body.apply_mask(x, keep, p=0.3), naive.dropout(x, ids, p=0.3, key=99), body)


def test_applying_non_contiguous_rows_and_masks(body):
    x, keep = torch.randn(30, 50).t(), torch.rand(30, 50).t() < 0.5
    assert torch.equal(body.apply_mask(x, keep, p=0.5), naive.apply_mask(x, keep, p=0.5))
    with pytest.raises(ValueError, match="outside"):
        body.apply_mask(x, keep, p=1.0)
