"""Row moves: packing for a message and adding back."""

import torch

from gnnpar_kernels import gather_rows, scatter_add_rows_


def test_gather_into_a_buffer():
    x, index = torch.randn(20, 3, 2), torch.tensor([4, 0, 19])
    buffer = torch.empty(3, 3, 2)
    assert gather_rows(x, index, out=buffer) is buffer
    assert torch.equal(buffer, x[index])
    assert torch.equal(gather_rows(x, index.int()), x[index])


def test_scatter_adds_unique_rows():
    out, index, x = torch.randn(20, 3), torch.tensor([7, 2, 11]), torch.randn(3, 3)
    expected = out.clone()
    expected[index] += x
    assert scatter_add_rows_(out, index, x) is out
    assert torch.equal(out, expected)


def test_nothing_to_move():
    none = torch.zeros(0, dtype=torch.int64)
    assert gather_rows(torch.randn(0, 4), none).shape == (0, 4)
    out = torch.randn(3, 4)
    assert torch.equal(scatter_add_rows_(out.clone(), none, torch.randn(0, 4)), out)
