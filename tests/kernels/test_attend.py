"""GAT aggregation: specification against autograd, the other bodies against the specification, chains in any order."""

import itertools

import pytest
import torch
from torch.nn.functional import leaky_relu

from gnnpar_kernels import Csr, keep_mask
from gnnpar_kernels import triton_tasks as tasks
from gnnpar_kernels.attend import cpu, cpu_edges, naive

SLOPE = 0.2
DROP = (0.4, 2**61 + 12345)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
SHAPES = [(1, 1), (1, 64), (2, 8), (3, 47), (4, 8), (8, 1), (8, 8)]
SPLIT = 20  # edges of a piece of a row in Triton
CUT_DEGREES = [0, 1, 4, 5, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1, 0, 3 * SPLIT + 2, 3]
FEW_DEGREES = [0, 1, 5, 16, 17, SPLIT + 1, 3]  # of wide rows, whose edges are taken one or two at a time
CUT_CASES = [  # heads, width, rows, indices, dropout, scale of the scores
    (1, 1, torch.float64, torch.int64, DROP, 1.0),
    (2, 8, torch.float64, torch.int32, DROP, 1e4),
    (3, 47, torch.float64, torch.int32, None, 1.0),
    (3, 256, torch.float64, torch.int32, DROP, 1.0),
    (4, 16, torch.float32, torch.int64, DROP, 1.0),
    (8, 128, torch.float32, torch.int32, None, 1.0),
    (2, 64, torch.float32, torch.int32, None, 1e4),
    (1, 640, torch.float32, torch.int32, None, 1.0),
    (8, 32, torch.bfloat16, torch.int32, DROP, 1.0),
    (4, 128, torch.bfloat16, torch.int32, None, 30.0),
    (1, 47, torch.float16, torch.int32, None, 1.0),
]


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SPLIT", SPLIT)


def _inputs(graph, heads, width, *, dtype=torch.float64, scale=1.0) -> tuple[torch.Tensor, ...]:
    x = torch.randn(graph.num_src, heads, width, dtype=dtype)
    a_src = torch.randn(graph.num_src, heads, dtype=dtype) * scale
    a_dst = torch.randn(graph.num_dst, heads, dtype=dtype) * scale
    return x, a_src, a_dst, torch.randn(graph.num_dst, heads, width, dtype=dtype)


def _autograd(graph, x, a_src, a_dst, grad_out, drop, slope=SLOPE) -> tuple[torch.Tensor, ...]:
    """(out, lse, three gradients) by plain autograd over edge tensors."""
    x, a_src, a_dst = (t.clone().requires_grad_() for t in (x, a_src, a_dst))
    score = leaky_relu(a_src[graph.src] + a_dst[graph.dst], slope)
    where = graph.dst[:, None].expand_as(score)
    top = torch.full_like(a_dst, -torch.inf).scatter_reduce(0, where, score.detach(), "amax")
    weight = torch.exp(score - top[graph.dst])
    mass = torch.zeros_like(a_dst).index_add(0, graph.dst, weight)
    alpha = weight / mass[graph.dst]
    if drop is not None:
        alpha = alpha * keep_mask(graph.ids, alpha.shape[1], p=drop[0], key=drop[1]) / (1.0 - drop[0])
    out = torch.zeros_like(grad_out).index_add(0, graph.dst, alpha[..., None] * x[graph.src])
    lse = torch.where(mass > 0, top + mass.log(), torch.inf)
    return out.detach(), lse.detach(), *torch.autograd.grad(out, (x, a_src, a_dst), grad_out)


def _fold(body, pieces, x, a_src, a_dst, drop, *, slope=SLOPE, branch=False):
    state = None
    for piece in pieces:
        indptr, indices, rows, ids = piece.forward[:4]
        state = body.attend(
            indptr,
            indices,
            x,
            a_src,
            a_dst,
            slope=slope,
            num_rows=a_dst.shape[0],
            rows=rows,
            state=state,
            drop=drop,
            edge_ids=ids,
            branch=branch,
        )
    return body.attend_finish(state)


def _total(parts):
    return [torch.stack(column).sum(0) for column in zip(*parts, strict=True)]


def _grads(body, pieces, inputs, out, lse, drop, *, slope=SLOPE):
    x, a_src, a_dst, grad_out = inputs
    parts = [
        body.attend_grad(piece.forward, piece.reverse, x, a_src, a_dst, out, lse, grad_out, slope=slope, drop=drop)
        for piece in pieces
    ]
    return _total(parts)


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
    out, lse = _fold(naive, [graph], *inputs[:3], drop=drop)
    actual = (out, lse, *_grads(naive, [graph], inputs, out, lse, drop))
    for got, reference in zip(actual, expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-12)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("drop", [None, DROP])
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_cpu_body_equals_specification(kit, heads, width, drop, dtype, scale, index):
    graph = kit.degree_graph(dtype=index)
    inputs = _inputs(graph, heads, width, dtype=dtype, scale=scale)
    wide = tuple(t.double() for t in inputs)
    out, lse = _fold(naive, [graph], *wide[:3], drop=drop)
    expected = (out, lse, *_grads(naive, [graph], wide, out, lse, drop))
    out, lse = _fold(cpu, [graph], *inputs[:3], drop=drop)
    assert out.dtype == lse.dtype == dtype
    # fp32 scores of size s are known to s * 6e-8, and so are the weights
    tolerance = TOLERANCE[dtype] * (1.0 if dtype == torch.float64 else max(1.0, scale / 10.0))
    actual = (out, lse, *_grads(cpu, [graph], inputs, out, lse, drop))
    for got, reference in zip(actual, expected, strict=True):
        kit.assert_near(got, reference, tolerance=tolerance)


@pytest.mark.quick(8)
@pytest.mark.parametrize(("heads", "width", "dtype", "index", "drop", "scale"), CUT_CASES)
def test_rows_of_every_length(kit, body, heads, width, dtype, index, drop, scale):
    """Degrees around the bounds of Triton's classes and pieces, in both orientations; some edges are multiple."""
    degrees = CUT_DEGREES if heads * width < 256 else FEW_DEGREES
    dst = torch.repeat_interleave(torch.arange(len(degrees)), torch.tensor(degrees))
    graph = kit.make_graph(torch.randint(0, 9, dst.shape), dst, num_src=11, num_dst=len(degrees), dtype=index)
    x, a_src, a_dst, grad_out = _inputs(graph, heads, width, scale=scale)
    x, grad_out = x.to(dtype), grad_out.to(dtype)
    if dtype != torch.float64:
        a_src, a_dst = a_src.float(), a_dst.float()
    inputs = (x, a_src, a_dst, grad_out)
    expected = _autograd(graph, *(t.double() for t in inputs), drop=drop)
    out, lse = _fold(body, [graph], *inputs[:3], drop=drop)
    actual = (out, lse, *_grads(body, [graph], inputs, out, lse, drop))
    assert [t.dtype for t in actual] == [lse.dtype, a_src.dtype, dtype, a_src.dtype, a_src.dtype]
    rounding = {torch.float16: 5e-4, torch.bfloat16: 4e-3}.get(dtype, 0.0)  # of the gradient of the rows
    # scores of size s are known to s times the precision, and so are the weights
    tolerance = (1e-15 if dtype == torch.float64 else 5e-7) * max(10.0, scale)
    for got, reference, add in zip(actual, expected, (0.0, 0.0, rounding, 0.0, 0.0), strict=True):
        _assert_similar(got, reference, tolerance=tolerance + add)
    again = _fold(body, [graph], *inputs[:3], drop=drop)
    assert torch.equal(out, again[0]) and torch.equal(lse, again[1])


@pytest.mark.quick(8)
@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("drop", "compress", "scale"), [(None, True, 1.0), (DROP, False, 1.0), (DROP, True, 1e4)])
def test_destination_gradient_without_edges(kit, body, slope, drop, compress, scale):
    """The sums over positive scores, chained over blocks in any order, give what a pass over edges gives."""
    graph = kit.degree_graph()
    inputs = _inputs(graph, 2, 8, scale=scale)
    _, a_src, a_dst, grad_out = inputs
    expected = _autograd(graph, *inputs, drop=drop, slope=slope)
    alpha = leaky_relu(a_src[graph.src] + a_dst[graph.dst], slope).sub(expected[1][graph.dst]).exp()
    alpha = alpha * (a_src[graph.src] + a_dst[graph.dst] > 0)
    share = torch.zeros_like(a_dst).index_add(0, graph.dst, alpha)
    pieces = kit.cut(graph, 3, compress=compress)
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        results = _fold(body, [pieces[p] for p in order], *inputs[:3], drop=drop, slope=slope, branch=True)
        out, lse, mass_pos, pos = results
        for got, reference in zip((out, lse, mass_pos), (*expected[:2], share), strict=True):
            kit.assert_near(got, reference, tolerance=1e-11)
        grad = body.attend_grad_dst_of(grad_out, out, pos, mass_pos, slope=slope)
        kit.assert_near(grad, expected[4], tolerance=1e-11)
        delta = (out * grad_out).sum(-1)
        unused = torch.full_like(out, torch.nan)
        again = body.attend_grad_dst_of(grad_out, unused, pos, mass_pos, slope=slope, delta=delta)
        kit.assert_near(again, grad, tolerance=1e-13)


@pytest.mark.quick(4)
@pytest.mark.parametrize("drop", [None, DROP])
@pytest.mark.parametrize("scale", [1.0, 100.0])
def test_destination_gradient_of_16_bit_rows(kit, body, drop, scale):
    graph = kit.degree_graph()
    x, a_src, a_dst, grad_out = _inputs(graph, 4, 32, dtype=torch.float32, scale=scale)
    x, grad_out = x.bfloat16(), grad_out.bfloat16()
    expected = _autograd(graph, *(t.double() for t in (x, a_src, a_dst, grad_out)), drop=drop)
    out, lse, mass_pos, pos = _fold(body, [graph], x, a_src, a_dst, drop=drop, branch=True)
    grad = body.attend_grad_dst_of(grad_out, out, pos, mass_pos, slope=SLOPE)
    assert grad.dtype == lse.dtype == mass_pos.dtype == torch.float32
    _assert_similar(grad, expected[4], tolerance=5e-7 * max(10.0, scale))


@pytest.mark.quick(4)
@pytest.mark.parametrize(  # every pair of values is there
    ("compress", "drop", "scale"), [(False, None, 1e4), (True, None, 1.0), (False, DROP, 1.0), (True, DROP, 1e4)]
)
def test_any_order_of_blocks(kit, body, compress, drop, scale):
    graph = kit.degree_graph()
    inputs = _inputs(graph, 2, 8, scale=scale)
    expected = _autograd(graph, *inputs, drop=drop)
    pieces = kit.cut(graph, 3, compress=compress)
    out = lse = None
    for order in itertools.islice(itertools.permutations(pieces), 0, None, 11):
        out, lse = _fold(body, order, *inputs[:3], drop=drop)
        for got, reference in zip((out, lse), expected[:2], strict=True):
            kit.assert_near(got, reference, tolerance=1e-11)
    # gradients are sums over the blocks, and of the order know only what the last fold gave
    for got, reference in zip(_grads(body, pieces, inputs, out, lse, drop), expected[2:], strict=True):
        kit.assert_near(got, reference, tolerance=1e-11)


@pytest.mark.quick(1)
def test_small_and_large_scores_chain(kit, body):
    """One block's scores need no shift, the other's do: the CPU body changes its state's kind midway."""
    graph = kit.degree_graph()
    x, a_src, a_dst, grad_out = _inputs(graph, 3, 8)
    far = graph.src >= 30
    sizes = {"num_src": graph.num_src, "num_dst": graph.num_dst}
    pieces = [kit.make_graph(graph.src[m], graph.dst[m], ids=graph.ids[m], **sizes) for m in (far, ~far)]
    for offset in (500.0, -3000.0):
        shifted = a_src + offset * (torch.arange(graph.num_src) >= 30)[:, None]
        near = torch.where(torch.arange(graph.num_src)[:, None] >= 30, 0.0, a_src)
        expected = _autograd(graph, x, shifted, a_dst, grad_out, None)
        for order in ([0, 1], [1, 0]):
            state = None
            for i in order:
                csr = pieces[i].forward
                a = shifted if i == 0 else near
                state = body.attend(
                    csr.indptr, csr.indices, x, a, a_dst, slope=SLOPE, num_rows=graph.num_dst, state=state
                )
            out, lse = body.attend_finish(state)
            kit.assert_near(out, expected[0], tolerance=1e-11)
            kit.assert_near(lse, expected[1], tolerance=1e-11)
            parts = [
                body.attend_grad(
                    p.forward, p.reverse, x, shifted if i == 0 else near, a_dst, out, lse, grad_out, slope=SLOPE
                )
                for i, p in enumerate(pieces)
            ]
            for got, reference in zip(_total(parts), expected[2:], strict=True):
                kit.assert_near(got, reference, tolerance=1e-11)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_many_row_blocks(kit, dtype, scale, monkeypatch):
    graph = kit.degree_graph()
    inputs = _inputs(graph, 3, 8, dtype=dtype, scale=scale)

    def run():
        out, lse = _fold(cpu, [graph], *inputs[:3], drop=DROP)
        return out, lse, *_grads(cpu, [graph], inputs, out, lse, DROP)

    expected = run()
    monkeypatch.setattr(cpu_edges, "BLOCK", 20)
    for got, reference in zip(run(), expected, strict=True):
        kit.assert_near(got, reference, tolerance=TOLERANCE[dtype])


@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_bf16_rows_are_computed_in_fp32(kit, body, scale):
    graph = kit.degree_graph()
    x, a_src, a_dst, grad_out = _inputs(graph, 2, 16, dtype=torch.float32, scale=scale)
    x, grad_out = x.bfloat16(), grad_out.bfloat16()
    wide = (x.double(), a_src.double(), a_dst.double(), grad_out.double())
    expected = _autograd(graph, *wide, drop=None)
    out, lse = _fold(body, [graph], x, a_src, a_dst, None)
    assert out.dtype == lse.dtype == torch.float32
    grads = _grads(body, [graph], (x, a_src, a_dst, grad_out), out, lse, None)
    assert grads[0].dtype == torch.bfloat16
    for got, reference, tolerance in zip((out, lse, *grads), expected, (1e-4, 1e-4, 1e-2, 1e-3, 1e-3), strict=True):
        kit.assert_near(got, reference, tolerance=tolerance)


def test_non_contiguous_inputs(kit, body):
    graph = kit.degree_graph()
    inputs = _inputs(graph, 4, 8)
    strided = tuple(torch.stack([t, t], -1)[..., 0] for t in inputs)
    transposed = tuple(t.transpose(0, 1).contiguous().transpose(0, 1) for t in inputs)
    out, lse = _fold(naive, [graph], *inputs[:3], drop=None)
    expected = (out, lse, *_grads(naive, [graph], inputs, out, lse, None))
    for variant in (strided, transposed):
        out, lse = _fold(body, [graph], *variant[:3], drop=None)
        for got, reference in zip((out, lse, *_grads(body, [graph], variant, out, lse, None)), expected, strict=True):
            kit.assert_near(got, reference, tolerance=1e-12)


@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("sizes", [(0, 0, 2, 3), (5, 0, 2, 3), (0, 4, 1, 1), (5, 4, 2, 0)])
def test_nothing_to_attend_to(kit, body, sizes, dtype):
    num_dst, num_src, heads, width = sizes
    none = torch.zeros(0, dtype=torch.int64)
    graph = kit.make_graph(none, none, num_src=num_src, num_dst=num_dst)
    inputs = _inputs(graph, heads, width, dtype=dtype)
    out, lse, mass_pos, pos = _fold(body, [graph, graph], *inputs[:3], drop=DROP, branch=True)
    assert not (out.any() or mass_pos.any() or pos.any())
    assert lse.eq(torch.inf).all()
    grad = body.attend_grad_dst_of(inputs[3], out, pos, mass_pos, slope=SLOPE)
    assert grad.shape == inputs[2].shape and not grad.any()
    grads = _grads(body, [graph], inputs, out, lse, DROP)
    assert [g.shape for g in grads] == [t.shape for t in inputs[:3]]
    assert not any(g.any() for g in grads)


def test_rows_of_other_blocks_do_not_overflow(kit, body):
    """A row whose lse is far below this block's scores has no edge here, whatever its exp(-lse)."""
    one = torch.tensor([0])
    graph = kit.make_graph(one, one, num_src=1, num_dst=2)
    inputs = _inputs(graph, 1, 4)
    out, lse = _fold(body, [graph], *inputs[:3], drop=None)
    lse[1] = -5000.0
    for got in _grads(body, [graph], inputs, out, lse, None):
        assert got.isfinite().all()


def test_grad_by_operand_and_given_delta(kit, body):
    graph = kit.degree_graph()
    inputs = _inputs(graph, 2, 8)
    x, a_src, a_dst, grad_out = inputs
    out, lse = _fold(body, [graph], x, a_src, a_dst, DROP)
    expected = _grads(body, [graph], inputs, out, lse, DROP)
    delta = (out * grad_out).sum(-1)
    rest = (x, a_src, a_dst, torch.full_like(out, torch.nan), lse, grad_out)

    def options(csr):
        return {"slope": SLOPE, "rows": csr.rows, "drop": DROP, "edge_ids": csr.edge_ids, "delta": delta}

    grad_x, grad_a_src = body.attend_grad_src(*graph.reverse[:2], *rest, **options(graph.reverse))
    grad_a_dst = body.attend_grad_dst(*graph.forward[:2], *rest, **options(graph.forward))
    for got, reference in zip((grad_x, grad_a_src, grad_a_dst), expected, strict=True):
        kit.assert_near(got, reference, tolerance=1e-13)


def test_dropout_without_edge_ids_is_refused(kit, body):
    graph = kit.degree_graph()
    bare = graph._replace(forward=Csr(graph.forward.indptr, graph.forward.indices))
    with pytest.raises(ValueError, match="edge_ids"):
        _fold(body, [bare], *_inputs(graph, 2, 8)[:3], drop=DROP)
