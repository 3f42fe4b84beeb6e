"""Row moves: packing for a message and adding back."""

import pytest
import torch

TYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8)


def _rows(*shape, dtype=torch.float32):
    """Small integers, whose sums are exact in every type."""
    return torch.randint(0, 100, shape).to(dtype)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (8,), (47,), (3, 2), (128,)])
def test_gather(body, shape, dtype):
    x, index = _rows(70, *shape, dtype=dtype), torch.randint(0, 70, (90,))
    for given in (index, index.int(), index[::3]):
        out = body.gather_rows(x, given)
        assert out.dtype == dtype
        assert torch.equal(out, x[given.long()])


def test_gather_into_a_buffer(body):
    x, index = torch.randn(20, 3, 2), torch.tensor([4, 0, 19])
    buffer = torch.empty(3, 3, 2)
    assert body.gather_rows(x, index, out=buffer) is buffer
    assert torch.equal(buffer, x[index])
    message = torch.zeros(1 + 3 * 24, dtype=torch.uint8)[1:]  # rows of a message may start anywhere
    body.gather_rows(x.view(torch.uint8).flatten(1), index, out=message.view(3, 24))
    assert torch.equal(message.view(3, 24), x[index].view(torch.uint8).flatten(1))


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(), (8,), (47,), (3, 2), (128,)])
def test_scatter_adds_unique_rows(body, shape, dtype):
    out, index = _rows(70, *shape, dtype=dtype), torch.randperm(70)[:45]
    x = _rows(45, *shape, dtype=dtype)
    expected = out.clone()
    expected[index] += x
    again = out.clone()
    assert body.scatter_add_rows_(out, index, x) is out
    assert torch.equal(out, expected)
    assert torch.equal(body.scatter_add_rows_(again, index.int(), x), expected)


def test_wide_rows(body):
    x, index = torch.randn(9, 5000), torch.tensor([4, 0, 8])
    assert torch.equal(body.gather_rows(x, index), x[index])
    out = torch.zeros(9, 5000)
    assert torch.equal(body.scatter_add_rows_(out, index, x[index])[index], x[index])
    assert not out[[1, 2, 3, 5, 6, 7]].any()


def test_non_contiguous_rows(body):
    wide, index = torch.randn(6, 30).t(), torch.tensor([3, 29, 5])
    for x in (wide, wide[:, 1:4], wide[:, ::2]):
        width = x.shape[1]
        assert torch.equal(body.gather_rows(x, index), x[index])
        out = torch.zeros(width, 3).t()
        assert body.gather_rows(x, index, out=out) is out
        assert torch.equal(out, x[index])
        total = torch.zeros(width, 30).t()
        assert body.scatter_add_rows_(total, index, x[index]) is total
        assert torch.equal(total[index], x[index])


def test_nothing_to_move(body):
    none = torch.zeros(0, dtype=torch.int64)
    assert body.gather_rows(torch.randn(0, 4), none).shape == (0, 4)
    assert body.gather_rows(torch.randn(5, 0), torch.tensor([1, 3])).shape == (2, 0)
    out = torch.randn(3, 4)
    assert torch.equal(body.scatter_add_rows_(out.clone(), none, torch.randn(0, 4)), out)
