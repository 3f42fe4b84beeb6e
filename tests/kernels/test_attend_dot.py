"""Dot-product attention: every body against plain autograd, blocks in any order."""

import pytest
import torch

from gnnpar_kernels import Csr, attend_dot_grad, attend_finish, keep_mask, row_dots
from gnnpar_kernels import attend_dot as fold
from gnnpar_kernels import triton_tasks as tasks
from gnnpar_kernels.attend_dot import cpu
from gnnpar_kernels.dispatch import functions_of

DROP = (0.4, 2**61 + 12345)
SPLIT = 20  # edges of a piece of a row in Triton
DEGREES = [0, 1, 4, 5, 16, 17, SPLIT + 1, 0, 3 * SPLIT + 2, 3]
CASES = [  # heads, width, attributes, rows, indices, dropout, scale of queries
    (1, 1, 0, torch.float64, torch.int64, DROP, 1.0),
    (3, 47, 5, torch.float64, torch.int32, None, 30.0),
    (4, 16, 0, torch.float32, torch.int64, DROP, 1.0),
    (4, 8, 3, torch.float32, torch.int32, None, 1.0),
    (4, 32, 4, torch.bfloat16, torch.int32, DROP, 1.0),
    (3, 256, 2, torch.float32, torch.int32, None, 1.0),
]


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SPLIT", SPLIT)


def _inputs(graph, heads, width, attributes, *, dtype=torch.float64, scale=1.0) -> tuple[torch.Tensor, ...]:
    """(key, value, query, grad_out), and with attributes (edge_query, edge): edges by ascending id."""
    key, value = (torch.randn(graph.num_src, heads, width, dtype=dtype) for _ in range(2))
    query = scale * max(width, 1) ** -0.5 * torch.randn(graph.num_dst, heads, width, dtype=dtype)
    grad_out = torch.randn(graph.num_dst, heads, width + attributes, dtype=dtype)
    near = scale * torch.randn(graph.num_dst, heads, attributes, dtype=dtype)
    beside = (near, torch.randn(len(graph.ids), attributes, dtype=dtype)) if attributes else ()
    return key, value, query, grad_out, *beside


def _autograd(graph, key, value, query, grad_out, *beside, drop) -> tuple[torch.Tensor, ...]:
    """(out, lse, gradients) by plain autograd over edge tensors."""
    inputs = tuple(t.detach().double().clone().requires_grad_() for t in (key, value, query, *beside))
    key, value, query = inputs[:3]
    score, values = (key[graph.src] * query[graph.dst]).sum(-1), value[graph.src]
    if beside:
        near, edge = inputs[3], inputs[4][:, None].expand(-1, key.shape[1], -1)
        score, values = score + (near[graph.dst] * edge).sum(-1), torch.cat([values, edge], -1)
    none = torch.full((graph.num_dst, key.shape[1]), -torch.inf, dtype=key.dtype)
    top = none.scatter_reduce(0, graph.dst[:, None].expand_as(score), score.detach(), "amax")
    weight = torch.exp(score - top[graph.dst])
    mass = torch.zeros_like(none).index_add(0, graph.dst, weight)
    alpha = weight / mass[graph.dst]
    if drop is not None:
        alpha = alpha * keep_mask(graph.ids, alpha.shape[1], p=drop[0], key=drop[1]) / (1.0 - drop[0])
    out = key.new_zeros(grad_out.shape).index_add(0, graph.dst, alpha[..., None] * values)
    lse = torch.where(mass > 0, top + mass.log(), torch.inf)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, inputs, grad_out.double())


def _places(ids, among) -> torch.Tensor:
    """Of ids, distinct, among others."""
    by_id = among.argsort()
    return by_id[torch.searchsorted(among[by_id], ids)]


def _run(body, graph, pieces, inputs, drop) -> tuple[torch.Tensor, ...]:
    """(out, lse, gradients), chained over pieces."""
    key, value, query, grad_out, *beside = inputs
    state, edges = None, []
    for piece in pieces:
        indptr, indices, rows, ids = piece.forward[:4]
        places = _places(ids, graph.ids)
        edges.append((places, {"edge": beside[1][places], "edge_query": beside[0]} if beside else {}))
        how = {"num_rows": piece.num_dst, "rows": rows, "drop": drop, "edge_ids": ids, **edges[-1][1]}
        state = body.attend_dot(indptr, indices, key, value, query, state=state, **how)
    out, lse = body.attend_finish(state)
    delta = body.row_dots(out, grad_out, dtype=lse.dtype)
    parts = list[list[torch.Tensor]]()
    for piece, (places, given) in zip(pieces, edges, strict=True):
        order = _places(piece.reverse.edge_ids, piece.forward.edge_ids)
        tensors = (order, key, value, query, lse, grad_out, delta)
        found = body.attend_dot_grad(piece.forward, piece.reverse, *tensors, drop=drop, **given, of_edge=bool(given))
        if given:
            found = (*found[:4], torch.zeros_like(beside[1]).index_copy_(0, places, found[4]))
        parts.append(list(found))
    return out, lse, *(torch.stack(column).sum(0) for column in zip(*parts, strict=True))


def _assert_similar(actual, expected, *, tolerance: float) -> None:
    """Norm of the differences against that of the reference, or against 1 if that is less; infinities coincide."""
    finite = expected.isfinite()
    assert actual.shape == expected.shape
    assert torch.equal(actual.isfinite(), finite)
    difference = actual.double()[finite] - expected[finite]
    assert float(difference.norm()) <= tolerance * max(1.0, float(expected[finite].norm()))


@pytest.mark.parametrize("drop", [None, DROP])
@pytest.mark.parametrize(("heads", "width", "attributes"), [(1, 1, 0), (3, 47, 4), (4, 8, 1)])
def test_specification_equals_autograd(kit, heads, width, attributes, drop):
    graph = kit.degree_graph()
    inputs = _inputs(graph, heads, width, attributes)
    expected = _autograd(graph, *inputs, drop=drop)
    for got, reference in zip(_run(functions_of("naive"), graph, [graph], inputs, drop), expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-12)


@pytest.mark.quick(5)
@pytest.mark.parametrize(("heads", "width", "attributes", "dtype", "index", "drop", "scale"), CASES)
def test_rows_of_every_length(kit, body, heads, width, attributes, dtype, index, drop, scale):
    """Degrees around the bounds of Triton's classes and pieces, in both orientations; some edges are multiple."""
    dst = torch.repeat_interleave(torch.arange(len(DEGREES)), torch.tensor(DEGREES))
    graph = kit.make_graph(torch.randint(0, 9, dst.shape), dst, num_src=11, num_dst=len(DEGREES), dtype=index)
    inputs = tuple(t.to(dtype) for t in _inputs(graph, heads, width, attributes, scale=scale))
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    expected = _autograd(graph, *inputs, drop=drop)
    actual = _run(body, graph, [graph], inputs, drop)
    assert [t.dtype for t in actual] == [wide, wide, *[dtype] * (len(actual) - 2)]
    rounding = 4e-3 if dtype == torch.bfloat16 else 0.0  # of the gradients of the rows
    # scores of size s are known to s times the precision, and so are the weights; keys have s times their gradient
    tolerance = (1e-15 if dtype == torch.float64 else 5e-7) * max(10.0, scale)
    for number, (got, reference) in enumerate(zip(actual, expected, strict=True)):
        bound = tolerance if number < 2 else tolerance * max(1.0, scale) + rounding
        _assert_similar(got, reference, tolerance=bound)
    for got, again in zip(actual, _run(body, graph, [graph], inputs, drop) if width < 16 else actual, strict=True):
        assert torch.equal(got, again)


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("order", "drop", "compress", "scale"), [((0, 1, 2, 3), DROP, True, 30.0), ((3, 2, 0, 1), None, False, 1.0)]
)
@pytest.mark.parametrize("attributes", [0, 3])
def test_any_order_of_blocks(kit, body, order, drop, compress, scale, attributes):
    graph = kit.degree_graph()
    inputs = _inputs(graph, 2, 8, attributes, scale=scale)
    expected = _autograd(graph, *inputs, drop=drop)
    pieces = kit.cut(graph, 3, compress=compress)
    actual = _run(body, graph, [pieces[p] for p in order], inputs, drop)
    for got, reference in zip(actual, expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-11)


@pytest.mark.parametrize("scale", [1.0, 30.0])
def test_many_blocks(kit, scale, monkeypatch):
    """Blocks of a few rows, some with scores that need a shift, one of a row longer than a block."""
    graph = kit.degree_graph()
    inputs = _inputs(graph, 3, 8, 2, scale=scale)
    expected = _run(functions_of("cpu"), graph, [graph], inputs, DROP)
    monkeypatch.setattr(cpu, "BLOCK", 20)
    for got, reference in zip(_run(functions_of("cpu"), graph, [graph], inputs, DROP), expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-12)


def test_non_contiguous_inputs(kit, body):
    graph = kit.degree_graph()
    inputs = _inputs(graph, 4, 8, 2)
    strided = tuple(torch.stack([t, t], -1)[..., 0] for t in inputs)
    expected = _autograd(graph, *inputs, drop=None)
    for got, reference in zip(_run(body, graph, [graph], strided, None), expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-12)


@pytest.mark.parametrize("sizes", [(0, 0, 2, 3), (5, 0, 2, 3), (0, 4, 1, 1), (5, 4, 2, 0)])
@pytest.mark.parametrize("attributes", [0, 2])
def test_nothing_to_attend_to(kit, body, sizes, attributes):
    num_dst, num_src, heads, width = sizes
    none = torch.zeros(0, dtype=torch.int64)
    graph = kit.make_graph(none, none, num_src=num_src, num_dst=num_dst)
    inputs = _inputs(graph, heads, width, attributes, dtype=torch.float32)
    out, lse, *grads = _run(body, graph, [graph], inputs, DROP)
    assert not out.any() and bool((lse == torch.inf).all())
    wanted = (*inputs[:3], *inputs[4:])
    assert [g.shape for g in grads] == [t.shape for t in wanted]
    assert not any(g.any() for g in grads)


def test_gradients_by_finite_differences(kit):
    """gradcheck of the public functions as an autograd.Function wraps them."""
    graph = kit.degree_graph()
    key, value, query, _, near, edge = _inputs(graph, 2, 3, 2)
    order = _places(graph.reverse.edge_ids, graph.forward.edge_ids)
    indptr, indices, _, ids = graph.forward[:4]

    class Attention(torch.autograd.Function):
        @staticmethod
        def forward(ctx, key, value, query, near, edge):
            given = {"edge": edge, "edge_query": near}
            state = fold(indptr, indices, key, value, query, num_rows=graph.num_dst, drop=DROP, edge_ids=ids, **given)
            out, lse = attend_finish(state)
            ctx.save_for_backward(key, value, query, near, edge, out, lse)
            return out.clone()

        @staticmethod
        def backward(ctx, *grad_outputs):
            key, value, query, near, edge, out, lse = ctx.saved_tensors
            ends = (lse, grad_outputs[0], row_dots(out, grad_outputs[0], dtype=lse.dtype))
            given = {"drop": DROP, "edge": edge, "edge_query": near, "of_edge": True}
            return attend_dot_grad(graph.forward, graph.reverse, order, key, value, query, *ends, **given)

    tensors = tuple(t.requires_grad_() for t in (key, value, query, near, edge[_places(ids, graph.ids)]))
    assert torch.autograd.gradcheck(Attention.apply, tensors, nondet_tol=0.0, fast_mode=True)


def test_dropout_without_edge_ids_is_refused(kit, body):
    graph = kit.degree_graph()
    key, value, query, _ = _inputs(graph, 2, 8, 0)
    bare = Csr(graph.forward.indptr, graph.forward.indices)
    with pytest.raises(ValueError, match="edge_ids"):
        body.attend_dot(bare.indptr, bare.indices, key, value, query, num_rows=graph.num_dst, drop=DROP)
