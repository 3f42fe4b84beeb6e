"""Attention: the specification against autograd, bodies against the specification, blocks in any order."""

import itertools

import pytest
import torch
from torch.nn.functional import leaky_relu

from gnnpar_kernels import Csr
from gnnpar_kernels import triton_tasks as tasks
from gnnpar_kernels.attend import cpu_edges
from gnnpar_kernels.attend_v2 import cpu as v2_cpu
from gnnpar_kernels.dispatch import functions_of
from kernels.attention import DOT, GAT, KINDS, SLOPE, V2, Dot, autograd, fold, inputs, run, total

DROP = (0.4, 2**61 + 12345)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-5}
SHAPES = [(1, 1), (1, 64), (2, 8), (3, 47), (4, 8), (8, 1), (8, 8)]
SPLIT = 20  # edges of a piece of a row in Triton
CUT_DEGREES = [0, 1, 4, 5, 15, 16, 17, SPLIT - 1, SPLIT, SPLIT + 1, 0, 3 * SPLIT + 2, 3]
FEW_DEGREES = [0, 1, 5, 16, 17, SPLIT + 1, 3]  # of GAT's wide rows, whose edges are taken one or two at a time
CUT_CASES = [  # kind, heads, width, rows, indices, dropout, scale of the scores
    (GAT, 1, 1, torch.float64, torch.int64, DROP, 1.0),
    (GAT, 2, 8, torch.float64, torch.int32, DROP, 1e4),
    (GAT, 3, 47, torch.float64, torch.int32, None, 1.0),
    (GAT, 3, 256, torch.float64, torch.int32, DROP, 1.0),
    (GAT, 4, 16, torch.float32, torch.int64, DROP, 1.0),
    (GAT, 8, 128, torch.float32, torch.int32, None, 1.0),
    (GAT, 2, 64, torch.float32, torch.int32, None, 1e4),
    (GAT, 1, 640, torch.float32, torch.int32, None, 1.0),
    (GAT, 8, 32, torch.bfloat16, torch.int32, DROP, 1.0),
    (GAT, 4, 128, torch.bfloat16, torch.int32, None, 30.0),
    (GAT, 1, 47, torch.float16, torch.int32, None, 1.0),
    (V2, 1, 1, torch.float64, torch.int64, DROP, 1.0),
    (V2, 3, 47, torch.float64, torch.int32, None, 30.0),
    (V2, 4, 16, torch.float32, torch.int64, DROP, 1.0),
    (V2, 4, 32, torch.bfloat16, torch.int32, DROP, 1.0),
    (DOT, 1, 1, torch.float64, torch.int64, DROP, 1.0),
    (Dot(5), 3, 47, torch.float64, torch.int32, None, 30.0),
    (DOT, 4, 16, torch.float32, torch.int64, DROP, 1.0),
    (Dot(3), 4, 8, torch.float32, torch.int32, None, 1.0),
    (Dot(4), 4, 32, torch.bfloat16, torch.int32, DROP, 1.0),
    (Dot(2), 3, 256, torch.float32, torch.int32, None, 1.0),
]


@pytest.fixture(autouse=True)
def _short_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tasks, "SPLIT", SPLIT)


def assert_all_near(kit, actual, expected, tolerance: float) -> None:
    for got, reference in zip(actual, expected, strict=True):
        kit.assert_near(got, reference, tolerance=tolerance)


def assert_similar(actual, expected, tolerance: float) -> None:
    """Norm of the differences against that of the reference, or against 1 if that is less; infinities coincide."""
    finite = expected.isfinite()
    assert actual.shape == expected.shape
    assert torch.equal(actual.isfinite(), finite)
    difference = actual.double()[finite] - expected[finite]
    assert float(difference.norm()) <= tolerance * max(1.0, float(expected[finite].norm()))


@pytest.mark.parametrize("drop", [None, DROP])
@pytest.mark.parametrize(
    ("kind", "heads", "width"),
    [
        *((GAT, *shape) for shape in SHAPES),
        *((V2, *shape) for shape in ((1, 1), (3, 47), (4, 8))),
        *((DOT, 1, 1), (Dot(4), 3, 47), (Dot(1), 4, 8)),
    ],
    ids=str,
)
def test_specification_equals_autograd(kit, kind, heads, width, drop):
    graph = kit.degree_graph()
    operands, grad_out = inputs(kind, graph, heads, width)
    actual = run(kind, functions_of("naive"), graph, [graph], operands, grad_out, drop)
    assert_all_near(kit, actual, autograd(kind, graph, operands, grad_out, drop), 1e-12)


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("scale", [1.0, 30.0, 1e4])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("drop", [None, DROP])
@pytest.mark.parametrize(("heads", "width"), SHAPES)
def test_cpu_body_of_gat_equals_specification(kit, heads, width, drop, dtype, scale, index):
    graph = kit.degree_graph(dtype=index)
    operands, grad_out = inputs(GAT, graph, heads, width, dtype=dtype, scale=scale)
    wide = tuple(t.double() for t in operands)
    expected = run(GAT, functions_of("naive"), graph, [graph], wide, grad_out.double(), drop)
    actual = run(GAT, functions_of("cpu"), graph, [graph], operands, grad_out, drop)
    assert actual[0].dtype == actual[1].dtype == dtype
    # fp32 scores of size s are known to s * 6e-8, and so are the weights
    assert_all_near(
        kit, actual, expected, TOLERANCE[dtype] * (1.0 if dtype == torch.float64 else max(1.0, scale / 10.0))
    )


@pytest.mark.quick(17)
@pytest.mark.parametrize(("kind", "heads", "width", "dtype", "index", "drop", "scale"), CUT_CASES, ids=str)
def test_rows_of_every_length(kit, body, kind, heads, width, dtype, index, drop, scale):
    """Degrees around the bounds of Triton's classes and pieces, in both orientations; some edges are multiple."""
    degrees = FEW_DEGREES if kind == GAT and heads * width >= 256 else CUT_DEGREES
    dst = torch.repeat_interleave(torch.arange(len(degrees)), torch.tensor(degrees))
    graph = kit.make_graph(torch.randint(0, 9, dst.shape), dst, num_src=11, num_dst=len(degrees), dtype=index)
    operands, grad_out = inputs(kind, graph, heads, width, dtype=dtype, scale=scale)
    expected = autograd(kind, graph, operands, grad_out, drop)
    actual = run(kind, body, graph, [graph], operands, grad_out, drop)
    wide = torch.promote_types(dtype, torch.float32)
    assert [t.dtype for t in actual] == [wide, wide, *(t.dtype for t in operands)]
    # scores of size s are known to s times the precision, and so are the weights
    tolerance = (1e-15 if dtype == torch.float64 else 5e-7) * max(10.0, scale)
    rounding = {torch.float16: 5e-4, torch.bfloat16: 4e-3}.get(dtype, 0.0)  # of the gradients of the rows
    of_rows = tolerance * (max(1.0, scale) if kind.by_scale else 1.0) + rounding
    for number, (got, reference) in enumerate(zip(actual, expected, strict=True)):
        assert_similar(got, reference, of_rows if 2 <= number < 2 + kind.narrow else tolerance)
    if width < 16:
        again = run(kind, body, graph, [graph], operands, grad_out, drop)
    else:
        again = fold(kind, body, graph, [graph], operands, drop)
    assert all(torch.equal(*both) for both in zip(actual, again, strict=False))


@pytest.mark.quick(8)
@pytest.mark.parametrize("slope", [0.0, 0.2, 1.0])
@pytest.mark.parametrize(("drop", "compress", "scale"), [(None, True, 1.0), (DROP, False, 1.0), (DROP, True, 1e4)])
def test_destination_gradient_without_edges(kit, body, slope, drop, compress, scale):
    """The sums over positive scores, chained over blocks in any order, give what a pass over edges gives."""
    graph = kit.degree_graph()
    operands, grad_out = inputs(GAT, graph, 2, 8, scale=scale)
    _, a_src, a_dst = operands
    expected = autograd(GAT, graph, operands, grad_out, drop, slope=slope)
    alpha = leaky_relu(a_src[graph.src] + a_dst[graph.dst], slope).sub(expected[1][graph.dst]).exp()
    alpha = alpha * (a_src[graph.src] + a_dst[graph.dst] > 0)
    share = torch.zeros_like(a_dst).index_add(0, graph.dst, alpha)
    pieces = kit.cut(graph, 3, compress=compress)
    for order in ([0, 1, 2, 3], [3, 2, 0, 1]):
        given = [pieces[p] for p in order]
        out, lse, mass_pos, pos = fold(GAT, body, graph, given, operands, drop, slope=slope, branch=True)
        assert_all_near(kit, (out, lse, mass_pos), (*expected[:2], share), 1e-11)
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
    operands, grad_out = inputs(GAT, graph, 4, 32, dtype=torch.bfloat16, scale=scale)
    expected = autograd(GAT, graph, operands, grad_out, drop)
    out, lse, mass_pos, pos = fold(GAT, body, graph, [graph], operands, drop, branch=True)
    grad = body.attend_grad_dst_of(grad_out, out, pos, mass_pos, slope=SLOPE)
    assert grad.dtype == lse.dtype == mass_pos.dtype == torch.float32
    assert_similar(grad, expected[4], 5e-7 * max(10.0, scale))


IN_ORDER, TURNED = (0, 1, 2, 3), (3, 2, 0, 1)
ORDERS = tuple(itertools.islice(itertools.permutations(range(4)), 0, None, 11))


@pytest.mark.quick(10)
@pytest.mark.parametrize(
    ("kind", "orders", "slope", "drop", "compress", "scale"),
    [
        (GAT, ORDERS, SLOPE, None, False, 1e4),  # every pair of values is there
        (GAT, ORDERS, SLOPE, None, True, 1.0),
        (GAT, ORDERS, SLOPE, DROP, False, 1.0),
        (GAT, ORDERS, SLOPE, DROP, True, 1e4),
        (V2, (IN_ORDER,), 0.0, DROP, True, 30.0),
        (V2, (TURNED,), -0.5, None, False, 1.0),
        *((Dot(n), (IN_ORDER,), SLOPE, DROP, True, 30.0) for n in (0, 3)),
        *((Dot(n), (TURNED,), SLOPE, None, False, 1.0) for n in (0, 3)),
    ],
    ids=str,
)
def test_any_order_of_blocks(kit, body, kind, orders, slope, drop, compress, scale):
    """Gradients are sums over the blocks, and of the order know only what the last fold gave."""
    graph = kit.degree_graph()
    operands, grad_out = inputs(kind, graph, 2, 8, scale=scale)
    expected = autograd(kind, graph, operands, grad_out, drop, slope=slope)
    pieces = kit.cut(graph, 3, compress=compress)
    *others, last = ([pieces[p] for p in order] for order in orders)
    for given in others:
        assert_all_near(kit, fold(kind, body, graph, given, operands, drop, slope=slope), expected[:2], 1e-11)
    assert_all_near(kit, run(kind, body, graph, last, operands, grad_out, drop, slope=slope), expected, 1e-11)


@pytest.mark.quick(1)
def test_small_and_large_scores_chain(kit, body):
    """One block's scores need no shift, the other's do: the CPU body changes its state's kind midway."""
    graph = kit.degree_graph()
    (x, a_src, a_dst), grad_out = inputs(GAT, graph, 3, 8)
    far, sizes = graph.src >= 30, {"num_src": graph.num_src, "num_dst": graph.num_dst}
    pieces = [kit.make_graph(graph.src[m], graph.dst[m], ids=graph.ids[m], **sizes) for m in (far, ~far)]
    large = (torch.arange(graph.num_src) >= 30)[:, None]
    for offset in (500.0, -3000.0):
        shifted = a_src + offset * large
        given = [(x, shifted, a_dst), (x, torch.where(large, 0.0, a_src), a_dst)]
        expected = autograd(GAT, graph, given[0], grad_out, None)
        for order in ([0, 1], [1, 0]):
            state = None
            for i in order:
                how = {"slope": SLOPE, "num_rows": graph.num_dst, "state": state}
                state = GAT.fold(body, graph, pieces[i], given[i], **how)
            out, lse = body.attend_finish(state)
            parts = [
                GAT.grad(body, graph, *both, (out, lse, grad_out), slope=SLOPE, drop=None)
                for both in zip(pieces, given, strict=True)
            ]
            assert_all_near(kit, (out, lse, *total(parts)), expected, 1e-11)


@pytest.mark.parametrize(
    ("kind", "dtype", "scale"),
    [
        *((GAT, dtype, scale) for dtype in TOLERANCE for scale in (1.0, 1e3)),
        *((kind, torch.float64, scale) for kind in (V2, Dot(2)) for scale in (1.0, 30.0)),
    ],
    ids=str,
)
def test_slices_of_a_few_rows(kit, kind, dtype, scale, monkeypatch):
    """Some with scores that need a shift, one of a row longer than a slice."""
    graph, body = kit.degree_graph(), functions_of("cpu")
    operands, grad_out = inputs(kind, graph, 3, 8, dtype=dtype, scale=scale)
    expected = run(kind, body, graph, [graph], operands, grad_out, DROP)
    for module, name, size in (
        (cpu_edges, "BLOCK", 20),
        (v2_cpu, "FEWEST", 20),
        (v2_cpu, "BYTES", 1),
    ):
        monkeypatch.setattr(module, name, size)
    assert_all_near(kit, run(kind, body, graph, [graph], operands, grad_out, DROP), expected, TOLERANCE[dtype])


def strided(t: torch.Tensor) -> torch.Tensor:
    return torch.stack([t, t], -1)[..., 0]


def transposed(t: torch.Tensor) -> torch.Tensor:
    return t.transpose(0, 1).contiguous().transpose(0, 1)


@pytest.mark.parametrize(("kind", "change"), [*((kind, strided) for kind in KINDS), (GAT, transposed)])
def test_non_contiguous_inputs(kit, body, kind, change):
    graph = kit.degree_graph()
    operands, grad_out = inputs(kind, graph, 4, 8)
    expected = autograd(kind, graph, operands, grad_out, None)
    given = tuple(map(change, operands))
    assert_all_near(kit, run(kind, body, graph, [graph], given, change(grad_out), None), expected, 1e-12)


@pytest.mark.parametrize(("kind", "dtype"), [(GAT, torch.float64), *((kind, torch.float32) for kind in KINDS)], ids=str)
@pytest.mark.parametrize("sizes", [(0, 0, 2, 3), (5, 0, 2, 3), (0, 4, 1, 1), (5, 4, 2, 0)])
def test_nothing_to_attend_to(kit, body, kind, sizes, dtype):
    num_dst, num_src, heads, width = sizes
    none = torch.zeros(0, dtype=torch.int64)
    graph = kit.make_graph(none, none, num_src=num_src, num_dst=num_dst)
    operands, grad_out = inputs(kind, graph, heads, width, dtype=dtype)
    out, lse, *grads = run(kind, body, graph, [graph, graph], operands, grad_out, DROP)
    assert not out.any()
    assert lse.eq(torch.inf).all()
    assert [g.shape for g in grads] == [t.shape for t in operands]
    if kind == GAT:
        _, _, mass_pos, pos = fold(GAT, body, graph, [graph, graph], operands, DROP, branch=True)
        grads += [mass_pos, pos, body.attend_grad_dst_of(grad_out, out, pos, mass_pos, slope=SLOPE)]
        assert grads[-1].shape == operands[2].shape
    assert not any(g.any() for g in grads)


def test_rows_of_other_blocks_do_not_overflow(kit, body):
    """A row whose lse is far below this block's scores has no edge here, whatever its exp(-lse)."""
    one = torch.tensor([0])
    graph = kit.make_graph(one, one, num_src=1, num_dst=2)
    operands, grad_out = inputs(GAT, graph, 1, 4)
    out, lse = fold(GAT, body, graph, [graph], operands, None)
    lse[1] = -5000.0
    for got in GAT.grad(body, graph, graph, operands, (out, lse, grad_out), slope=SLOPE, drop=None):
        assert got.isfinite().all()


def test_grad_by_operand_and_given_delta(kit, body):
    graph = kit.degree_graph()
    operands, grad_out = inputs(GAT, graph, 2, 8)
    out, lse, *expected = run(GAT, body, graph, [graph], operands, grad_out, DROP)
    rest = (*operands, torch.full_like(out, torch.nan), lse, grad_out)

    def options(csr):
        delta = (out * grad_out).sum(-1)
        return {"slope": SLOPE, "rows": csr.rows, "drop": DROP, "edge_ids": csr.edge_ids, "delta": delta}

    of_src = body.attend_grad_src(*graph.reverse[:2], *rest, **options(graph.reverse))
    of_dst = body.attend_grad_dst(*graph.forward[:2], *rest, **options(graph.forward))
    assert_all_near(kit, (*of_src, of_dst), expected, 1e-13)


def test_the_slope_at_zero_is_that_of_torch(kit, body):
    graph = kit.degree_graph()
    (x, y, a), grad_out = inputs(V2, graph, 2, 8)
    operands = (x.masked_fill(x < 0.5, 0.0), y.masked_fill(y < 0.5, 0.0), a)
    expected = autograd(V2, graph, operands, grad_out, None)
    assert_all_near(kit, run(V2, body, graph, [graph], operands, grad_out, None), expected, 1e-12)


@pytest.mark.parametrize("kind", [GAT, V2, DOT], ids=str)
def test_dropout_without_edge_ids_is_refused(kit, body, kind):
    graph = kit.degree_graph()
    bare = graph._replace(forward=Csr(graph.forward.indptr, graph.forward.indices))
    with pytest.raises(ValueError, match="edge_ids"):
        fold(kind, body, graph, [bare], inputs(kind, graph, 2, 8)[0], DROP)
