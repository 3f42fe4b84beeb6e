"""GATv2 aggregation: every body against plain autograd, blocks in any order."""

import pytest
import torch
from torch.nn.functional import leaky_relu

from gnnpar_kernels import Csr, keep_mask
from gnnpar_kernels import triton_tasks as tasks
from gnnpar_kernels.attend_v2 import cpu
from gnnpar_kernels.dispatch import functions_of

SLOPE = 0.2
DROP = (0.4, 2**61 + 12345)
SHAPES = [(1, 1), (3, 47), (4, 8)]
SPLIT = 20  # edges of a piece of a row in Triton
DEGREES = [0, 1, 4, 5, 16, 17, SPLIT + 1, 0, 3 * SPLIT + 2, 3]
CASES = [  # heads, width, rows, indices, dropout, scale of a
    (1, 1, torch.float64, torch.int64, DROP, 1.0),
    (3, 47, torch.float64, torch.int32, None, 30.0),
    (4, 16, torch.float32, torch.int64, DROP, 1.0),
    (4, 32, torch.bfloat16, torch.int32, DROP, 1.0),
]


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SPLIT", SPLIT)


def _inputs(graph, heads, width, *, dtype=torch.float64, scale=1.0) -> tuple[torch.Tensor, ...]:
    """(x, y, a, grad_out)."""
    x, y, grad_out = (torch.randn(n, heads, width, dtype=dtype) for n in (graph.num_src, graph.num_dst, graph.num_dst))
    return x, y, scale * width**-0.5 * torch.randn(heads, width, dtype=dtype), grad_out


def _autograd(graph, x, y, a, grad_out, drop, slope=SLOPE) -> tuple[torch.Tensor, ...]:
    """(out, lse, three gradients) by plain autograd over edge tensors."""
    x, y, a = (t.detach().double().clone().requires_grad_() for t in (x, y, a))
    score = (leaky_relu(x[graph.src] + y[graph.dst], slope) * a).sum(-1)
    none = torch.full((graph.num_dst, a.shape[0]), -torch.inf, dtype=a.dtype)
    top = none.scatter_reduce(0, graph.dst[:, None].expand_as(score), score.detach(), "amax")
    weight = torch.exp(score - top[graph.dst])
    mass = torch.zeros_like(none).index_add(0, graph.dst, weight)
    alpha = weight / mass[graph.dst]
    if drop is not None:
        alpha = alpha * keep_mask(graph.ids, alpha.shape[1], p=drop[0], key=drop[1]) / (1.0 - drop[0])
    out = torch.zeros_like(y).index_add(0, graph.dst, alpha[..., None] * x[graph.src])
    lse = torch.where(mass > 0, top + mass.log(), torch.inf)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (x, y, a), grad_out.double())


def _order(graph) -> torch.Tensor:
    """Place in `forward` of every edge of `reverse`: ids are distinct."""
    ids = graph.forward.edge_ids
    by_id = ids.argsort()
    return by_id[torch.searchsorted(ids[by_id], graph.reverse.edge_ids)]


def _run(body, pieces, inputs, drop, *, slope=SLOPE) -> tuple[torch.Tensor, ...]:
    """(out, lse, three gradients), chained over pieces."""
    x, y, a, grad_out = inputs
    state = None
    for piece in pieces:
        indptr, indices, rows, ids = piece.forward[:4]
        how = {"num_rows": piece.num_dst, "rows": rows, "drop": drop, "edge_ids": ids}
        state = body.attend_v2(indptr, indices, x, y, a, slope=slope, state=state, **how)
    out, lse = body.attend_finish(state)
    delta = body.row_dots(out, grad_out, dtype=lse.dtype)
    parts = [
        body.attend_v2_grad(
            piece.forward, piece.reverse, _order(piece), x, y, a, lse, grad_out, delta, slope=slope, drop=drop
        )
        for piece in pieces
    ]
    return out, lse, *(torch.stack(column).sum(0) for column in zip(*parts, strict=True))


def _assert_similar(actual, expected, *, tolerance: float) -> None:
    """Norm of the differences against that of the reference, or against 1 if that is less; infinities coincide."""
    finite = expected.isfinite()
    assert actual.shape == expected.shape
    assert torch.equal(actual.isfinite(), finite)
    difference = actual.double()[finite] - expected[finite]
    assert float(difference.norm()) <= tolerance * max(1.0, float(expected[finite].norm()))


@pytest.mark.parametrize("drop", [None, DROP])
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_specification_equals_autograd(kit, heads, width, drop):
    graph = kit.degree_graph()
    inputs = _inputs(graph, heads, width)
    expected = _autograd(graph, *inputs, drop=drop)
    for got, reference in zip(_run(functions_of("naive"), [graph], inputs, drop), expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-12)


@pytest.mark.quick(4)
@pytest.mark.parametrize(("heads", "width", "dtype", "index", "drop", "scale"), CASES)
def test_rows_of_every_length(kit, body, heads, width, dtype, index, drop, scale):
    """Degrees around the bounds of Triton's classes and pieces, in both orientations; some edges are multiple."""
    dst = torch.repeat_interleave(torch.arange(len(DEGREES)), torch.tensor(DEGREES))
    graph = kit.make_graph(torch.randint(0, 9, dst.shape), dst, num_src=11, num_dst=len(DEGREES), dtype=index)
    x, y, a, grad_out = _inputs(graph, heads, width, scale=scale)
    x, y, grad_out = (t.to(dtype) for t in (x, y, grad_out))
    a = a if dtype == torch.float64 else a.float()
    inputs = (x, y, a, grad_out)
    expected = _autograd(graph, *inputs, drop=drop)
    actual = _run(body, [graph], inputs, drop)
    assert [t.dtype for t in actual] == [a.dtype, a.dtype, dtype, dtype, a.dtype]
    rounding = 4e-3 if dtype == torch.bfloat16 else 0.0  # of the gradients of the rows
    # scores of size s are known to s times the precision, and so are the weights; rows have s times their gradient
    tolerance = (1e-15 if dtype == torch.float64 else 5e-7) * max(10.0, scale)
    of_rows = tolerance * max(1.0, scale) + rounding
    for got, reference, bound in zip(
        actual, expected, (tolerance, tolerance, of_rows, of_rows, tolerance), strict=True
    ):
        _assert_similar(got, reference, tolerance=bound)
    for got, again in zip(actual, _run(body, [graph], inputs, drop) if width < 16 else actual, strict=True):
        assert torch.equal(got, again)


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("order", "slope", "drop", "compress", "scale"),
    [((0, 1, 2, 3), 0.0, DROP, True, 30.0), ((3, 2, 0, 1), -0.5, None, False, 1.0)],
)
def test_any_order_of_blocks(kit, body, order, slope, drop, compress, scale):
    graph = kit.degree_graph()
    inputs = _inputs(graph, 2, 8, scale=scale)
    expected = _autograd(graph, *inputs, drop=drop, slope=slope)
    pieces = kit.cut(graph, 3, compress=compress)
    actual = _run(body, [pieces[p] for p in order], inputs, drop, slope=slope)
    for got, reference in zip(actual, expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-11)


def test_the_slope_at_zero_is_that_of_torch(kit, body):
    graph = kit.degree_graph()
    x, y, a, grad_out = _inputs(graph, 2, 8)
    inputs = (x.masked_fill(x < 0.5, 0.0), y.masked_fill(y < 0.5, 0.0), a, grad_out)
    expected = _autograd(graph, *inputs, drop=None)
    for got, reference in zip(_run(body, [graph], inputs, None), expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-12)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_many_slices(kit, scale, monkeypatch):
    """Slices of a few rows, some with scores that need a shift, one of a row longer than a slice."""
    graph = kit.degree_graph()
    inputs = _inputs(graph, 3, 8, scale=scale)
    expected = _run(functions_of("cpu"), [graph], inputs, DROP)
    monkeypatch.setattr(cpu, "FEWEST", 20)
    monkeypatch.setattr(cpu, "BYTES", 1)
    for got, reference in zip(_run(functions_of("cpu"), [graph], inputs, DROP), expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-12)


def test_non_contiguous_inputs(kit, body):
    graph = kit.degree_graph()
    inputs = _inputs(graph, 4, 8)
    strided = tuple(torch.stack([t, t], -1)[..., 0] for t in inputs)
    expected = _autograd(graph, *inputs, drop=None)
    for got, reference in zip(_run(body, [graph], strided, None), expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-12)


@pytest.mark.parametrize("sizes", [(0, 0, 2, 3), (5, 0, 2, 3), (0, 4, 1, 1), (5, 4, 2, 0)])
def test_nothing_to_attend_to(kit, body, sizes):
    num_dst, num_src, heads, width = sizes
    none = torch.zeros(0, dtype=torch.int64)
    graph = kit.make_graph(none, none, num_src=num_src, num_dst=num_dst)
    inputs = (*(torch.randn(n, heads, width) for n in (num_src, num_dst)), torch.randn(heads, width))
    out, lse, *grads = _run(body, [graph], (*inputs, torch.randn(num_dst, heads, width)), DROP)
    assert not out.any() and bool((lse == torch.inf).all())
    assert [g.shape for g in grads] == [t.shape for t in inputs]
    assert not any(g.any() for g in grads)


def test_dropout_without_edge_ids_is_refused(kit, body):
    graph = kit.degree_graph()
    x, y, a, _ = _inputs(graph, 2, 8)
    bare = Csr(graph.forward.indptr, graph.forward.indices)
    with pytest.raises(ValueError, match="edge_ids"):
        body.attend_v2(bare.indptr, bare.indices, x, y, a, slope=SLOPE, num_rows=graph.num_dst, drop=DROP)
