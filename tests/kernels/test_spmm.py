"""Sums over in-edges: every body against a dense product in fp64; pieces of work cover every edge once."""

import pytest
import torch

from gnnpar_kernels import triton_tasks as tasks
from gnnpar_kernels.cpu_bags import bag, weighted_sums
from gnnpar_kernels.extremum.cpu import extremum
from gnnpar_kernels.spmm import cpu, naive

TOLERANCE = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


def _dense(graph):
    matrix = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.float64)
    return matrix.index_put_(
        (graph.dst, graph.src), torch.ones(graph.src.shape[0], dtype=torch.float64), accumulate=True
    )


@pytest.mark.quick(64)
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("shape", [(), (1,), (8,), (47,), (300,), (2, 5), (0,), (2, 0)])
def test_sums_equal_dense_product(kit, body, shape, dtype, index):
    graph = kit.degree_graph(dtype=index)
    x = torch.randn(graph.num_src, *shape).to(dtype)
    expected = _dense(graph) @ x.double().reshape(graph.num_src, x[0].numel())
    out = body.spmm(graph.forward.indptr, graph.forward.indices, x, num_rows=graph.num_dst)
    assert out.dtype == dtype
    kit.assert_near(out, expected.view(graph.num_dst, *shape), tolerance=TOLERANCE[dtype])


@pytest.fixture
def cut_rows(kit, monkeypatch):
    """Rows around the bounds of the classes and of the pieces that Triton cuts them into; few sources: multi-edges."""
    monkeypatch.setattr(tasks, "SPLIT", 20)
    degrees = torch.tensor([0, 1, 4, 5, 15, 16, 17, 19, 20, 21, 0, 40, 41, 200, 3])

    def make(**options):
        dst = torch.repeat_interleave(torch.arange(len(degrees), device=degrees.device), degrees)
        src = torch.randint(0, 9, dst.shape)
        return kit.make_graph(src, dst, num_src=11, num_dst=len(degrees), **options)

    return make


@pytest.mark.parametrize(
    ("width", "dtype"),
    [(width, torch.float32) for width in (8, 16, 47, 64, 256)]
    + [(width, torch.bfloat16) for width in (32, 47, 128, 600)],
)
def test_cut_rows(kit, body, cut_rows, width, dtype):
    graph = cut_rows()
    x = torch.randn(graph.num_src, width).to(dtype)
    args = graph.forward.indptr, graph.forward.indices, x
    out = body.spmm(*args, num_rows=graph.num_dst)
    kit.assert_near(out, _dense(graph) @ x.double(), tolerance=TOLERANCE[dtype])
    assert torch.equal(out, body.spmm(*args, num_rows=graph.num_dst))


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("index", [torch.int32, torch.int64])
def test_cut_rows_accumulate(kit, body, cut_rows, dtype, index):
    graph = cut_rows()
    x, start = torch.randn(graph.num_src, 12).to(dtype), torch.randn(graph.num_dst, 12).to(dtype)
    expected = start.double()
    for piece in kit.cut(graph, 2, dtype=index, compress=True):
        csr, expected = piece.forward, expected + _dense(piece) @ x.double()
        body.spmm(csr.indptr, csr.indices, x, num_rows=graph.num_dst, rows=csr.rows, out=start)
    kit.assert_near(start, expected, tolerance=2 * TOLERANCE[dtype])


def test_result_of_another_layout_or_type(kit, body, cut_rows):
    graph = cut_rows()
    x = torch.randn(graph.num_src, 6)
    args, expected = (graph.forward.indptr, graph.forward.indices), _dense(graph) @ x.double()
    holder = torch.zeros(6, graph.num_dst + 2)
    out = holder[:, 1:-1].t()
    assert body.spmm(*args, x, num_rows=graph.num_dst, out=out) is out
    kit.assert_near(out, expected, tolerance=1e-5)
    assert not holder[:, 0].any() and not holder[:, -1].any()
    total = torch.zeros(graph.num_dst, 6)
    body.spmm(*args, x.bfloat16(), num_rows=graph.num_dst, out=total)
    kit.assert_near(total, _dense(graph) @ x.bfloat16().double(), tolerance=1e-5)


def test_a_row_of_thousands_of_edges(kit, body):
    src = torch.randint(0, 50, (5000,))
    graph = kit.make_graph(src, torch.ones_like(src), num_src=50, num_dst=2)
    x = torch.randn(50, 4)
    out = body.spmm(graph.forward.indptr, graph.forward.indices, x, num_rows=2)
    kit.assert_near(out, _dense(graph) @ x.double(), tolerance=1e-5)


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("block", [16, 1 << 17])
def test_chain_of_blocks_accumulates(kit, body, dtype, compress, block, monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK", block)
    graph = kit.degree_graph()
    x, start = torch.randn(graph.num_src, 3, 4, dtype=dtype), torch.randn(graph.num_dst, 3, 4, dtype=dtype)
    expected = start.double() + (_dense(graph) @ x.double().view(-1, 12)).view(-1, 3, 4)
    out = start.clone()
    for piece in reversed(kit.cut(graph, 3, compress=compress)):
        csr = piece.forward
        result = body.spmm(csr.indptr, csr.indices, x, num_rows=graph.num_dst, rows=csr.rows, out=out)
        assert result is out
    kit.assert_near(out, expected, tolerance=TOLERANCE[dtype])


def test_compressed_rows_into_a_fresh_result(kit, body):
    csr = kit.degree_graph(compress=True).forward
    x = torch.randn(60, 8)
    out = body.spmm(csr.indptr, csr.indices, x, num_rows=9, rows=csr.rows)
    plain = kit.degree_graph().forward
    kit.assert_near(out, naive.spmm(plain.indptr, plain.indices, x, num_rows=9), tolerance=1e-5)
    assert not out[0].any()


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_non_contiguous_rows(kit, body, dtype):
    graph = kit.degree_graph()
    wide = torch.randn(16, graph.num_src, dtype=dtype)
    for x in (wide.t(), wide.t()[:, 3:9], wide.t()[:, ::2]):
        out = body.spmm(graph.forward.indptr, graph.forward.indices, x, num_rows=graph.num_dst)
        kit.assert_near(out, _dense(graph) @ x.double(), tolerance=1e-5)


@pytest.mark.parametrize("num_rows", [0, 5])
@pytest.mark.parametrize("num_src", [0, 4])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_no_edges(body, num_rows, num_src, dtype):
    indptr, indices = torch.zeros(num_rows + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    out = body.spmm(indptr, indices, torch.randn(num_src, 7, dtype=dtype), num_rows=num_rows)
    assert out.shape == (num_rows, 7)
    assert not out.any()


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("width", [1, 8, 47])
def test_weighted_sums_equal_dense_product(kit, body, cut_rows, width, dtype):
    graph = cut_rows()
    weights = torch.randn(graph.src.shape[0], dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    x, start = torch.randn(graph.num_src, width).to(dtype), torch.randn(graph.num_dst, width).to(dtype)
    matrix = torch.zeros(graph.num_dst, graph.num_src, dtype=torch.float64)
    matrix.index_put_((graph.dst, graph.src), weights.double(), accumulate=True)  # the edges are listed by destination
    args = graph.forward.indptr, graph.forward.indices, x
    out = body.spmm(*args, num_rows=graph.num_dst, weights=weights)
    assert out.dtype == dtype
    kit.assert_near(out, matrix @ x.double(), tolerance=3 * TOLERANCE[dtype])
    expected = start.double() + matrix @ x.double()
    assert body.spmm(*args, num_rows=graph.num_dst, weights=weights, out=start) is start
    kit.assert_near(start, expected, tolerance=3 * TOLERANCE[dtype])


@pytest.mark.parametrize("block", [16, 1 << 17])
def test_weights_of_compressed_blocks(kit, body, block, monkeypatch):
    monkeypatch.setattr(cpu, "BLOCK", block)
    graph = kit.degree_graph()
    x, weight_of = torch.randn(graph.num_src, 3, 4, dtype=torch.float64), torch.rand(graph.src.shape[0]).double()
    whole = body.spmm(*graph.forward[:2], x, num_rows=graph.num_dst, weights=weight_of)
    total = torch.zeros_like(whole)
    for piece in kit.cut(graph, 3, compress=True):
        csr = piece.forward
        weights = weight_of[torch.searchsorted(graph.forward.edge_ids, csr.edge_ids)]
        body.spmm(*csr[:2], x, num_rows=graph.num_dst, rows=csr.rows, weights=weights, out=total)
    kit.assert_near(total, whole, tolerance=1e-13)
    ones = torch.ones_like(weight_of)
    plain = body.spmm(*graph.forward[:2], x, num_rows=graph.num_dst)
    kit.assert_near(body.spmm(*graph.forward[:2], x, num_rows=graph.num_dst, weights=ones), plain, tolerance=1e-13)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("column", [5, -1, 1 << 30])
def test_indices_outside_the_table_are_refused(dtype: torch.dtype, column: int) -> None:
    """On a CPU, whoever made the columns: the last line behind the checks of shards and checkpoints."""
    indptr, indices = torch.tensor([0, 2], dtype=torch.int32), torch.tensor([0, column], dtype=torch.int32)
    table, weights = torch.ones(5, 3, dtype=dtype), torch.ones(2, dtype=dtype)
    outside = pytest.raises((ValueError, RuntimeError), match=r"of a table of 5 rows|not in the valid range")
    with outside:
        bag(table, indices, indptr)
    with outside:
        bag(table, indices, indptr, weights)
    with outside:
        weighted_sums(table[:, 0].contiguous(), indices, indptr, weights)
    with outside:
        extremum(indptr, indices, table, torch.arange(5), num_rows=1)


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
