"""Fold laws: any split of the edges into blocks gives one result, and `grad` is the gradient (fp64, plain autograd)."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from gnnpar.folds.aggregator import EdgeDropout
from gnnpar.folds.block import Block, Operands, widened
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax, SoftmaxDot, SoftmaxV2
from gnnpar.folds.sum import Sum
from gnnpar.folds.wrapped import TypeFilteredFold
from gnnpar_kernels import keep_mask

N, M, H, D = 12, 9, 2, 3
DROP = EdgeDropout(0.4, key=1234567)


def _score(src, dst, edge, shared):
    return (F.leaky_relu(src[0] + dst[0] + edge[0], 0.2) * shared[0]).sum(-1)


def _value(src, dst, edge, shared):
    return src[0] * 2 + edge[0] * shared[1]


def _plain(src, dst, edge, shared):
    return src[0] * dst[0] + edge[0]


def _attention(score, value, dst, drop, num_edges):
    """Softmax over in-edges, written out."""
    top = torch.full((N, score.shape[1]), -torch.inf, dtype=score.dtype)
    top = top.scatter_reduce(0, dst[:, None].expand_as(score), score.detach(), "amax")
    weight = (score - top[dst]).exp()
    total = torch.zeros_like(top).index_add(0, dst, weight)
    alpha = weight / total[dst]
    if drop is not None:
        alpha = alpha * keep_mask(torch.arange(num_edges), score.shape[1], p=drop.p, key=drop.key) / (1 - drop.p)
    return torch.zeros(N, *value.shape[1:], dtype=value.dtype).index_add(0, dst, alpha[..., None] * value)


def _reference(name, agg, x, src, dst):
    zeros = torch.zeros(N, *x.src[0].shape[1:], dtype=torch.float64)
    if name == "sum":
        return zeros.index_add(0, dst, x.src[0][src])
    if name == "max":
        index = dst[:, None, None].expand(-1, H, D)
        best = zeros.scatter_reduce(0, index, x.src[0][src], "amax", include_self=False)
        return best
    if name == "generic_sum":
        return zeros.index_add(0, dst, _plain((x.src[0][src],), (x.dst[0][dst],), x.edge, x.shared))
    if name.startswith("softmax"):
        score = F.leaky_relu(x.src[1][src] + x.dst[0][dst], agg.slope)
        return _attention(score, x.src[0][src], dst, agg.dropout, len(src))
    if name.startswith("v2"):
        score = (F.leaky_relu(x.src[0][src] + x.dst[0][dst], agg.slope) * x.shared[0]).sum(-1)
        return _attention(score, x.src[0][src], dst, agg.dropout, len(src))
    if name.startswith("dot"):
        score = (x.src[0][src] * x.dst[0][dst]).sum(-1)
        score = score + (x.dst[1][dst] * x.edge[0][:, None]).sum(-1) if x.edge else score
        return _attention(score, agg.value((x.src[0][src], x.src[1][src]), (), x.edge, ()), dst, agg.dropout, len(src))
    rows = ((x.src[0][src],), (x.dst[0][dst],), x.edge, x.shared)
    return _attention(_score(*rows), _value(*rows), dst, agg.dropout, len(src))


AGGREGATORS = {
    "sum": Sum(),
    "max": Max(),
    "softmax": Softmax(),
    "softmax_dropout": Softmax(0.1, DROP),
    "v2": SoftmaxV2(),
    "v2_dropout": SoftmaxV2(0.1, DROP),
    "dot": SoftmaxDot(),
    "dot_dropout": SoftmaxDot(DROP),
    "dot_edges": SoftmaxDot(None, with_edges=True, of_edges=True),
    "dot_edges_dropout": SoftmaxDot(DROP, with_edges=True, of_edges=True),
    "generic": Generic(value=_value, score=_score),
    "generic_dropout": Generic(value=_value, score=_score, dropout=DROP),
    "generic_sum": Generic(value=_plain),
}


def _operands(name, num_edges, gen):
    def rand(*shape):
        return torch.randn(*shape, dtype=torch.float64, generator=gen).requires_grad_()

    if name in ("sum", "max"):
        return Operands((rand(M, H, D),))
    if name.startswith("softmax"):
        return Operands((rand(M, H, D), rand(M, H)), (rand(N, H),))
    if name.startswith("v2"):
        return Operands((rand(M, H, D),), (rand(N, H, D),), (), (rand(H, D),))
    if name.startswith("dot_edges"):  # the result is as wide as the others'
        return Operands(
            (rand(M, H, D - 1), rand(M, H, D - 1)), (rand(N, H, D - 1), rand(N, H, 1)), (rand(num_edges, 1),)
        )
    if name.startswith("dot"):
        return Operands((rand(M, H, D), rand(M, H, D)), (rand(N, H, D),))
    return Operands((rand(M, H, D),), (rand(N, H, D),), (rand(num_edges, H, D),), (rand(H, D), rand(H, D)))


def _blocks(src, dst, row_group, column_group, types=None):
    """Rectangles of rows x columns; some may be empty. Yields (block, positions of its edges)."""
    for r in range(int(row_group.max()) + 1):
        for c in range(int(column_group.max()) + 1):
            edges = ((row_group[dst] == r) & (column_group[src] == c)).nonzero().flatten()
            data, src_ids = EdgeData(edges, type=None if types is None else types[edges]), torch.arange(M) * 3
            sizes = {"num_dst": N, "num_src": M}
            yield Block.from_edges(dst[edges], src[edges], **sizes, src_ids=src_ids, edges=data, compress=r > 0), edges


def _run(agg, x, blocks, order, grad_out):
    """Fold and differentiate block by block; operands detached as in an autograd.Function."""
    x = Operands(*(tuple(t.detach() for t in group) for group in x))
    blocks = [blocks[i] for i in order]
    state = agg.init(N, x)
    for block, edges in blocks:
        state = agg.update(state, block, x._replace(edge=tuple(t[edges] for t in x.edge)))
    out, saved = agg.finish(state)
    total = [torch.zeros_like(widened(t)) for group in x for t in group]
    prepared = agg.prepare(saved, grad_out)
    for into, g in zip(total[len(x.src) :], agg.grad_dst(prepared, grad_out), strict=False):
        into += g
    for block, edges in blocks:
        grads = agg.grad(block, x._replace(edge=tuple(t[edges] for t in x.edge)), prepared, grad_out)
        flat = [*grads.src, *grads.dst]
        for into, g in zip(total, flat, strict=False):
            into += g
        at = len(x.src) + len(x.dst)
        for into, g in zip(total[at:], grads.edge, strict=False):
            into[edges] += g
        for into, g in zip(total[at + len(x.edge) :], grads.shared, strict=False):
            into += g
    return out, total


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", AGGREGATORS)
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), num_edges=st.integers(0, 60), rows=st.integers(1, 3), columns=st.integers(1, 3))
def test_any_split_in_any_order_equals_autograd(name, seed, num_edges, rows, columns):
    agg, gen = AGGREGATORS[name], torch.Generator().manual_seed(seed)
    dst = torch.randint(0, N, (num_edges,), generator=gen).sort().values
    src = torch.randint(0, M, (num_edges,), generator=gen)
    x = _operands(name, num_edges, gen)
    expected = _reference(name, agg, x, src, dst)
    grad_out = torch.randn(expected.shape, dtype=torch.float64, generator=gen)
    leaves = [t for group in x for t in group]
    wanted = torch.autograd.grad(expected, leaves, grad_out, allow_unused=True)
    row_group = torch.randint(0, rows, (N,), generator=gen)
    column_group = torch.randint(0, columns, (M,), generator=gen)
    blocks = list(_blocks(src, dst, row_group, column_group))
    order = torch.randperm(len(blocks), generator=gen).tolist()
    out, grads = _run(agg, x, blocks, order, grad_out)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)
    if name == "max" and num_edges != len(set(zip(src.tolist(), dst.tolist(), strict=True))):
        return  # scatter_reduce shares the gradient among repeated edges, Max gives it to one winner
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, rtol=1e-9, atol=1e-9)
    again, _ = _run(agg, x, blocks, order, grad_out)
    assert torch.equal(out, again), "a fixed order gives the same bits"


@pytest.mark.parametrize("name", AGGREGATORS)
def test_rows_of_16_bits_are_added_up_in_fp32(name):
    """Over several blocks, and so are their gradients: as these rows in fp64, to roundings of fp32."""
    agg, gen = AGGREGATORS[name], torch.Generator().manual_seed(0)
    dst = torch.randint(0, N, (400,), generator=gen).sort().values
    src = torch.randint(0, M, (400,), generator=gen)
    groups = torch.arange(N) % 2, torch.arange(M) % 3
    blocks = list(_blocks(src, dst, *groups))
    narrow = Operands(*(tuple(t.detach().bfloat16() for t in group) for group in _operands(name, 400, gen)))
    wide = Operands(*(tuple(t.double() for t in group) for group in narrow))
    grad_out = torch.randn(N, H, D, dtype=torch.float64, generator=gen)
    expected, wanted = _run(agg, wide, blocks, range(len(blocks)), grad_out)
    out, grads = _run(agg, narrow, blocks, range(len(blocks)), grad_out.float())
    for got, want in zip([out, *grads], [expected, *wanted], strict=True):
        assert got.dtype == torch.float32
        torch.testing.assert_close(got.double(), want, rtol=1e-5, atol=1e-4)


def test_max_gives_a_tie_to_the_smallest_id_whatever_the_order():
    src, dst = torch.tensor([2, 5, 7]), torch.tensor([0, 0, 0])
    x = Operands((torch.ones(M, H, D, dtype=torch.float64),))
    groups = torch.tensor([0, 0, 2, 0, 0, 1, 0, 0, 0])
    blocks = list(_blocks(src, dst, torch.zeros(N, dtype=torch.long), groups))
    for order in ([0, 1, 2], [2, 1, 0], [1, 2, 0]):
        _, (grad,) = _run(Max(), x, blocks, order, torch.ones(N, H, D, dtype=torch.float64))
        assert grad.sum((1, 2)).nonzero().flatten().tolist() == [2]


def test_generic_survives_more_edges_than_it_takes_at_once(monkeypatch):
    monkeypatch.setattr("gnnpar.folds.generic._EDGES_AT_ONCE", 7)
    gen = torch.Generator().manual_seed(0)
    dst = torch.cat([torch.zeros(20, dtype=torch.long), torch.randint(1, N, (40,), generator=gen).sort().values])
    src = torch.randint(0, M, (60,), generator=gen)
    agg, x = AGGREGATORS["generic"], _operands("generic", 60, gen)
    expected = _reference("generic", agg, x, src, dst)
    grad_out = torch.randn(expected.shape, dtype=torch.float64, generator=gen)
    wanted = torch.autograd.grad(expected, [t for group in x for t in group], grad_out)
    block = Block.from_edges(dst, src, num_dst=N, num_src=M, src_ids=torch.arange(M), edges=EdgeData(torch.arange(60)))
    out, grads = _run(agg, x, [(block, torch.arange(60))], [0], grad_out)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)
    for got, want in zip(grads, wanted, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", AGGREGATORS)
def test_blocks_without_edges_give_zeros(name):
    none = torch.zeros(0, dtype=torch.long)
    x = _operands(name, 0, torch.Generator().manual_seed(0))
    block = Block.from_edges(none, none, num_dst=N, num_src=M, src_ids=torch.arange(M), edges=EdgeData(none))
    out, grads = _run(AGGREGATORS[name], x, [(block, none)], [0], torch.ones(N, H, D, dtype=torch.float64))
    assert out.shape == (N, H, D)
    assert not out.any()
    assert all(not g.any() for g in grads)


@pytest.mark.parametrize("name", ["softmax", "softmax_dropout"])
@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), num_edges=st.integers(0, 60), columns=st.integers(1, 3))
def test_pushed_rows_give_the_gradients_of_both_sides(name, seed, num_edges, columns):
    """grad_src from transposed blocks, each cut in two by destinations, and grad_dst without edges, equal autograd."""
    agg, gen = AGGREGATORS[name].pushing(), torch.Generator().manual_seed(seed)
    dst = torch.randint(0, N, (num_edges,), generator=gen).sort().values
    src = torch.randint(0, M, (num_edges,), generator=gen)
    x = _operands(name, num_edges, gen)
    expected = _reference(name, agg, x, src, dst)
    grad_out = torch.randn(expected.shape, dtype=torch.float64, generator=gen)
    wanted = torch.autograd.grad(expected, [*x.src, *x.dst], grad_out, allow_unused=True)
    x = Operands(*(tuple(t.detach() for t in group) for group in x))
    blocks = [b for b, _ in _blocks(src, dst, torch.zeros(N, dtype=torch.long), torch.arange(M) % columns)]
    state = agg.init(N, x)
    for block in blocks:
        state = agg.update(state, block, x)
    out, saved = agg.finish(state)
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)
    prepared = agg.prepare(saved, grad_out)
    pushed = agg.pushed(x, prepared, grad_out)
    grads = [torch.zeros_like(t) for t in x.src]
    for block in blocks:
        back = block.transposed()
        for first, last in ((0, back.num_src // 3), (back.num_src // 3, back.num_src)):
            rows = slice(first, last) if block.rows is None else block.rows[first:last]
            piece = back.narrow_columns(first, last)
            mine = agg.grad_src(piece.forward, x.src, tuple(t[rows] for t in pushed))
            for into, g in zip(grads, mine, strict=True):
                into += g
    for got, want in zip([*grads, *agg.grad_dst(prepared, grad_out)], wanted, strict=True):
        torch.testing.assert_close(got, torch.zeros_like(got) if want is None else want, rtol=1e-9, atol=1e-9)


@given(seed=st.integers(0, 1000), num_edges=st.integers(0, 60), compress=st.booleans(), pieces=st.integers(1, M + 1))
def test_a_block_is_the_sum_of_its_column_ranges_and_transposes_back(seed, num_edges, compress, pieces):
    gen = torch.Generator().manual_seed(seed)
    dst = torch.randint(0, N, (num_edges,), generator=gen).sort().values
    src = torch.randint(0, M, (num_edges,), generator=gen)
    ids = torch.arange(num_edges)
    block = Block.from_edges(
        dst, src, num_dst=N, num_src=M, src_ids=torch.arange(M) * 3, edges=EdgeData(ids), compress=compress
    )
    found = []
    for i in range(pieces):
        first, last = M * i // pieces, M * (i + 1) // pieces
        piece = block.narrow_columns(first, last)
        assert piece.src_ids is not None and piece.edge_ids is not None
        assert piece.src_ids.tolist() == [3 * j for j in range(first, last)]
        found += zip(piece.edge_ids.tolist(), piece.edge_dst.tolist(), (piece.indices + first).tolist(), strict=True)
    assert sorted(found) == list(zip(ids.tolist(), dst.tolist(), src.tolist(), strict=True))
    back = block.transposed()
    assert back.edge_ids is not None
    listed = torch.arange(N) if block.rows is None else block.rows
    edges = zip(back.edge_ids.tolist(), listed[back.indices.long()].tolist(), back.edge_dst.tolist(), strict=True)
    assert sorted(edges) == list(zip(ids.tolist(), dst.tolist(), src.tolist(), strict=True))


def _one_block(name):
    gen = torch.Generator().manual_seed(5)
    src, dst = torch.randint(0, M, (40,), generator=gen), torch.randint(0, N, (40,), generator=gen).sort().values
    none = torch.zeros(M, dtype=torch.int64), torch.zeros(N, dtype=torch.int64)
    blocks = list(_blocks(src, dst, none[1], none[0]))
    return blocks, _operands(name, 40, gen), torch.randn(N, H, D, dtype=torch.float64, generator=gen)


def _sliced(x, cut):
    return Operands(*(tuple(cut(t) for t in group) for group in x))


@pytest.mark.parametrize("name", [n for n, agg in AGGREGATORS.items() if agg.separates != "no"])
def test_a_fold_separates_as_it_says(name):
    """The fold of slices is the slice of the fold, and so are its gradients; shared tensors have heads first."""
    agg, (blocks, x, grad_out) = AGGREGATORS[name], _one_block(name)
    out, grads = _run(agg, x, blocks, [0], grad_out)
    of_rows = len(x.src) + len(x.dst)
    cuts = [lambda t, h=h: t[:, h : h + 1] for h in range(H)]
    if agg.separates == "columns":
        cuts += [lambda t: t[..., 1:], lambda t: t[..., :1]]
    for cut in cuts:
        heads = tuple(cut(t[None])[0] for t in x.shared)
        part, part_grads = _run(agg, _sliced(x, cut)._replace(shared=heads), blocks, [0], cut(grad_out))
        torch.testing.assert_close(part, cut(out))
        cut_grads = [cut(g) for g in grads[:of_rows]] + [cut(g[None])[0] for g in grads[of_rows:]]
        torch.testing.assert_close(part_grads, cut_grads)


def test_what_does_not_separate_says_so():
    assert {name for name, agg in AGGREGATORS.items() if agg.separates_values} == {"softmax", "softmax_dropout"}
    assert {name: agg.separates for name, agg in AGGREGATORS.items()} == {
        "sum": "columns",
        "max": "columns",
        "softmax": "heads",
        "softmax_dropout": "no",
        "v2": "heads",
        "v2_dropout": "no",
        "dot": "heads",
        "dot_dropout": "no",
        "dot_edges": "no",
        "dot_edges_dropout": "no",
        "generic": "no",
        "generic_dropout": "no",
        "generic_sum": "no",
    }
    agg, (blocks, x, grad_out) = AGGREGATORS["softmax_dropout"], _one_block("softmax_dropout")
    whole, part = (
        _run(agg, _sliced(x, cut), blocks, [0], cut(grad_out))[0] for cut in (lambda t: t, lambda t: t[:, 1:])
    )
    assert not torch.allclose(part, whole[:, 1:]), "a mask is drawn for all heads together"


@pytest.mark.parametrize("name", [n for n, agg in AGGREGATORS.items() if agg.separates_values])
def test_values_separate_and_gradients_of_what_weighs_them_are_sums(name):
    agg, (blocks, x, grad_out) = AGGREGATORS[name], _one_block(name)
    out, grads = _run(agg, x, blocks, [0], grad_out)
    summed = [torch.zeros_like(g) for g in grads]
    for cut in (lambda t: t[..., :1], lambda t: t[..., 1:]):
        sliced = x._replace(src=(cut(x.src[0]).contiguous(), *x.src[1:]))
        part, part_grads = _run(agg, sliced, blocks, [0], cut(grad_out).contiguous())
        torch.testing.assert_close(part, cut(out))
        torch.testing.assert_close(part_grads[0], cut(grads[0]))
        summed = [total + g if i else total for i, (total, g) in enumerate(zip(summed, part_grads, strict=True))]
    torch.testing.assert_close(summed[1:], grads[1:])


@pytest.mark.parametrize("name", AGGREGATORS)
def test_a_fold_that_takes_blocks_does_not_ask_for_whole_neighborhoods(name):
    agg, (blocks, x, grad_out) = AGGREGATORS[name], _one_block(name)
    assert not agg.whole_neighborhood
    (whole, edges), half = blocks[0], torch.arange(40) % 2 == 0
    pieces = [(whole.restrict(keep), edges[keep]) for keep in (half, ~half)]
    if name == "max":  # a block holds all edges between its rows and its columns
        even = whole.indices % 2 == 0
        pieces = [(whole.restrict(keep), edges[keep]) for keep in (even, ~even)]
    torch.testing.assert_close(_run(agg, x, pieces, [0, 1], grad_out), _run(agg, x, blocks, [0], grad_out))


@pytest.mark.parametrize("number", [0, 1, 2, 3])
@pytest.mark.parametrize("name", ["sum", "max", "softmax", "generic"])
def test_a_fold_over_one_type_is_the_fold_without_the_other_edges(name, number):
    """Block by block, gradients included; no edge has type 3."""
    agg, gen = AGGREGATORS[name], torch.Generator().manual_seed(6)
    src, dst, types = (torch.randint(0, n, (40,), generator=gen) for n in (M, N, 3))
    dst, x, grad_out = dst.sort().values, _operands(name, 40, gen), torch.randn(N, H, D, generator=gen).double()
    alone = (types == number).nonzero().flatten()
    for rows, columns in ((1, 1), (2, 3)):
        groups = torch.arange(N) % rows, torch.arange(M) % columns
        blocks = list(_blocks(src, dst, *groups, types))
        others = [(block, alone[edges]) for block, edges in _blocks(src[alone], dst[alone], *groups)]
        out, grads = _run(TypeFilteredFold(agg, number), x, blocks, range(len(blocks)), grad_out)
        expected, wanted = _run(agg, x, others, range(len(others)), grad_out)
        assert torch.equal(out, expected)
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(grads, wanted, strict=True))


@pytest.mark.parametrize(
    "fold", [Sum(), Max(), Softmax(), SoftmaxV2(), SoftmaxDot()], ids=lambda fold: type(fold).__name__
)
def test_fewer_rows_than_columns_are_refused_before_a_kernel_reads_them(fold) -> None:
    block = Block.from_edges(torch.arange(3), torch.arange(3), num_dst=3, num_src=3, src_ids=torch.arange(3))
    short = Operands(
        src=(torch.ones(1, H, D), torch.ones(1, H)), dst=(torch.ones(3, H, D),), shared=(torch.ones(H, D),)
    )
    with pytest.raises(ValueError, match="there are 1 rows for 3 columns"):
        fold.update(fold.init(3, short), block, short)
