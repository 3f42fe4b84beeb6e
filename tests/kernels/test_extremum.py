"""Maximum over in-edges with its winner: one winner, the smallest id among ties, whatever the order of blocks."""

import itertools

import pytest
import torch

from gnnpar_kernels import triton_tasks as tasks
from gnnpar_kernels.dispatch import functions_of
from gnnpar_kernels.extremum import naive

IDS = {
    "range": lambda: torch.arange(60) + 1000,
    "scattered": lambda: torch.arange(60) ** 2 * 2**28,
}


def _loop(graph, x, ids):
    """The definition, row by row."""
    best, arg = x.new_zeros(graph.num_dst, x.shape[1]), torch.full((graph.num_dst, x.shape[1]), -1)
    for i in graph.dst.unique().tolist():
        mine = graph.src[graph.dst == i].unique()
        best[i] = x[mine].amax(0)
        for f in range(x.shape[1]):
            arg[i, f] = ids[mine[x[mine, f] == best[i, f]]].min()
    return best, arg


@pytest.mark.parametrize("index", [torch.int32, torch.int64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("ids", IDS)
def test_equals_the_definition(kit, body, dtype, index, ids):
    graph = kit.degree_graph(dtype=index)
    x = torch.randint(-3, 4, (graph.num_src, 5)).to(dtype)
    best, arg = _loop(graph, x, IDS[ids]())
    state = body.extremum(graph.forward.indptr, graph.forward.indices, x, IDS[ids](), num_rows=graph.num_dst)
    assert torch.equal(state[1], arg)
    assert torch.equal(body.extremum_finish(state), best)


@pytest.mark.quick(7)
@pytest.mark.parametrize(
    ("shape", "dtype"),
    [(shape, torch.float32) for shape in ((), (8,), (47,), (2, 128))]
    + [(shape, torch.bfloat16) for shape in ((64,), (600,))]
    + [((16,), torch.float16)],
)
def test_cut_rows(kit, body, shape, dtype, monkeypatch):
    monkeypatch.setattr(tasks, "SPLIT", 20)
    degrees = torch.tensor([0, 1, 4, 5, 15, 16, 17, 19, 20, 21, 0, 40, 41, 200, 3])
    dst = torch.repeat_interleave(torch.arange(len(degrees)), degrees)
    graph = kit.make_graph(torch.randint(0, 58, dst.shape), dst, num_src=60, num_dst=len(degrees))
    x, ids = torch.randint(-9, 10, (60, *shape)).to(dtype), IDS["scattered"]()
    expected = naive.extremum(graph.forward.indptr, graph.forward.indices, x, ids, num_rows=graph.num_dst)
    state = None
    for piece in kit.cut(graph, 2, dtype=torch.int64, compress=True):
        indptr, indices, rows, *_ = piece.forward
        state = body.extremum(indptr, indices, x, ids, num_rows=graph.num_dst, rows=rows, state=state)
    assert state is not None
    once = body.extremum(graph.forward.indptr, graph.forward.indices, x, ids, num_rows=graph.num_dst)
    for actual in (state, once):
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])


@pytest.mark.parametrize("compress", [False, True])
def test_any_order_of_blocks_has_the_same_winners(kit, body, compress):
    graph = kit.degree_graph()
    x, ids = torch.randint(-2, 3, (graph.num_src, 2, 3)).double(), IDS["scattered"]()
    expected = naive.extremum(graph.forward.indptr, graph.forward.indices, x, ids, num_rows=graph.num_dst)
    orders = itertools.permutations(kit.cut(graph, 3, compress=compress))
    for order in itertools.islice(orders, 0, None, 7 if body is functions_of("triton") else 1):
        state = None
        for piece in order:
            indptr, indices, rows, *_ = piece.forward
            state = body.extremum(indptr, indices, x, ids, num_rows=graph.num_dst, rows=rows, state=state)
        assert state is not None
        assert torch.equal(state[0], expected[0])
        assert torch.equal(state[1], expected[1])


@pytest.mark.parametrize("ids", IDS)
def test_gradient_reaches_the_winner_alone(kit, body, ids):
    graph = kit.degree_graph()
    x, ids = torch.randint(-2, 3, (graph.num_src, 4)).double(), IDS[ids]()
    _, arg = naive.extremum(graph.forward.indptr, graph.forward.indices, x, ids, num_rows=graph.num_dst)
    grad_out = torch.randn(graph.num_dst, 4, dtype=torch.float64)
    expected = torch.zeros_like(x)
    for i, f in itertools.product(range(graph.num_dst), range(4)):
        if arg[i, f] >= 0:
            expected[ids.tolist().index(int(arg[i, f])), f] += grad_out[i, f]
    kit.assert_near(body.extremum_grad(arg, ids, grad_out), expected, tolerance=1e-14)
    halves = [body.extremum_grad(arg, part, grad_out) for part in (ids[:25], ids[25:])]
    kit.assert_near(torch.cat(halves), expected, tolerance=1e-14)


def test_gradient_of_a_hub_in_16_bits(kit, body):
    """One source wins everywhere: its gradient is a long sum, which bf16 would stall at 256."""
    arg = torch.zeros(1000, 3, dtype=torch.int64)
    grad = body.extremum_grad(arg, torch.arange(2), torch.ones(1000, 3, dtype=torch.bfloat16))
    kit.assert_near(grad[0], torch.full((3,), 1000.0), tolerance=1e-2)


@pytest.mark.parametrize(("num_dst", "num_src", "width"), [(0, 0, 3), (4, 0, 3), (0, 4, 3), (4, 4, 0)])
def test_no_edges(body, num_dst, num_src, width):
    indptr, indices = torch.zeros(num_dst + 1, dtype=torch.int32), torch.zeros(0, dtype=torch.int32)
    ids = torch.arange(num_src)
    state = body.extremum(indptr, indices, torch.randn(num_src, width), ids, num_rows=num_dst)
    assert state[1].eq(-1).all()
    out = body.extremum_finish(state)
    assert out.shape == (num_dst, width)
    assert not out.any()
    grad = body.extremum_grad(state[1], ids, torch.ones(num_dst, width))
    assert grad.shape == (num_src, width)
    assert not grad.any()


def test_minus_infinity_is_a_value(kit, body):
    graph = kit.degree_graph()
    x = torch.full((graph.num_src, 2), -torch.inf)
    expected = naive.extremum(graph.forward.indptr, graph.forward.indices, x, IDS["range"](), num_rows=graph.num_dst)
    actual = body.extremum(graph.forward.indptr, graph.forward.indices, x, IDS["range"](), num_rows=graph.num_dst)
    assert torch.equal(actual[1], expected[1])


def test_non_contiguous_rows_and_state(kit, body):
    graph = kit.degree_graph()
    x = torch.randn(6, graph.num_src).t()
    args = graph.forward.indptr, graph.forward.indices
    expected = naive.extremum(*args, x, IDS["range"](), num_rows=graph.num_dst)
    state = torch.full((6, graph.num_dst), -torch.inf).t(), torch.full((6, graph.num_dst), -1).t()
    for before in (None, state):
        actual = body.extremum(*args, x, IDS["range"](), num_rows=graph.num_dst, state=before)
        assert torch.equal(actual[0], expected[0])
        assert torch.equal(actual[1], expected[1])
