"""Pieces of work cover every edge of every row once, in classes of like length."""

import pytest
import torch

from gnnpar_kernels import triton_tasks as tasks


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("split", [17, 20, 1024])
def test_every_edge_once(monkeypatch, split, dtype):
    monkeypatch.setattr(tasks, "SPLIT", split)
    degrees = torch.tensor([0, 1, 4, 5, 15, 16, 17, 0, split - 1, split, split + 1, 3 * split, 3 * split + 1, 2])
    indptr = torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]).to(dtype)
    found = tasks.tasks_of(indptr)
    assert tasks.tasks_of(indptr) is found
    seen = torch.zeros(int(indptr[-1]), dtype=torch.int64)
    rows = []
    for bound, members in zip(tasks.LOW, found.low, strict=True):
        assert (degrees[members] <= bound).all()
        rows += members.tolist()
        for r in members.tolist():
            seen[indptr[r] : indptr[r + 1]] += 1
    for row, begin, end, slot in zip(found.row, found.begin, found.end, found.slot, strict=True):
        assert 0 < end - begin <= split
        assert indptr[row] <= begin < end <= indptr[row + 1]
        assert (slot < 0) == (int(degrees[row]) <= split)
        seen[begin:end] += 1
    assert (seen == 1).all()
    assert sorted(rows + sorted(set(found.row.tolist()))) == list(range(len(degrees)))
    assert found.slot[: found.num_slots].tolist() == list(range(found.num_slots))
    for s, row in enumerate(found.split_row.tolist()):
        pieces = slice(int(found.split_first[s]), int(found.split_first[s + 1]))
        assert (found.row[pieces] == row).all()
        assert found.begin[pieces][0] == indptr[row] and found.end[pieces][-1] == indptr[row + 1]
        assert torch.equal(found.end[pieces][:-1], found.begin[pieces][1:])


def test_rows_that_are_not_cut_keep_their_order():
    """The order of nodes puts rows side by side that read the same sources: sorting by degree would scatter them."""
    degrees = torch.tensor([20, 200, 30, 5000, 17, 2000, 256])
    found = tasks.tasks_of(torch.cat([degrees.new_zeros(1), degrees.cumsum(0)]).int())
    assert found.row[found.num_slots :].tolist() == [0, 1, 2, 4, 6]
    assert found.split_row.tolist() == [3, 5], "the longest of the cut rows first"


def test_no_rows_and_no_edges():
    for indptr in (torch.zeros(1, dtype=torch.int32), torch.zeros(4, dtype=torch.int32)):
        found = tasks.tasks_of(indptr)
        assert found.num_pieces == found.num_slots == len(found.split_row) == 0
        assert sum(len(rows) for rows in found.low) == len(indptr) - 1
