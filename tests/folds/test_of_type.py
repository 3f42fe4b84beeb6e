"""A fold over the edges of one type is that fold where the other edges are not there, its gradient included."""

import pytest
import torch

from gnnpar.folds.aggregator import Aggregator
from gnnpar.folds.block import Block, Operands
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.generic import Generic
from gnnpar.folds.max import Max
from gnnpar.folds.softmax import Softmax
from gnnpar.folds.sum import Sum
from gnnpar.folds.wrapped import TypeFilteredFold

N, M, E, KINDS = 6, 5, 24, 3
GEN = torch.Generator().manual_seed(0)
DST = torch.randint(0, N, (E,), generator=GEN).sort().values
SRC = torch.randint(0, M, (E,), generator=GEN)
TYPES = torch.randint(0, KINDS, (E,), generator=GEN)


def block(keep: torch.Tensor) -> Block:
    ids = torch.arange(E)
    edges = EdgeData(ids=ids, type=TYPES).at(keep)
    return Block.from_edges(DST[keep], SRC[keep], num_dst=N, num_src=M, src_ids=torch.arange(M), edges=edges)


def rows(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def of_edge(src, dst, edge, shared):
    return src[0] * edge[0] + dst[0]


FOLDS: list[tuple[Aggregator, Operands]] = [
    (Sum(), Operands((rows(M, 3),))),
    (Max(), Operands((rows(M, 3),))),
    (Softmax(branch=False), Operands((rows(M, 2, 3), rows(M, 2)), (rows(N, 2),))),
    (Generic(value=of_edge), Operands((rows(M, 3),), (rows(N, 3),), (rows(E, 3),))),
]


def folded(agg: Aggregator, blocks: list[Block], x: Operands) -> tuple[torch.Tensor, list[Operands]]:
    """Of blocks of all edges of `x`, by their ids."""
    state = agg.init(N, x)
    given = [x._replace(edge=tuple(t[b.edge_ids] for t in x.edge)) for b in blocks]
    for each, operands in zip(blocks, given, strict=True):
        state = agg.update(state, each, operands)
    out, saved = agg.finish(state)
    grad_out = rows(*out.shape)
    prepared = agg.prepare(saved, grad_out)
    return out, [agg.grad(b, o, prepared, grad_out) for b, o in zip(blocks, given, strict=True)]


@pytest.mark.parametrize(("fold", "x"), FOLDS, ids=lambda each: type(each).__name__)
@pytest.mark.parametrize("number", [0, 1, 2, KINDS])
def test_it_is_the_fold_without_the_other_edges(fold: Aggregator, x: Operands, number: int) -> None:
    """The number beyond all types has no edge."""
    whole, alone = block(torch.arange(E)), block(torch.eq(TYPES, number).nonzero().flatten())
    out, (grads,) = folded(TypeFilteredFold(fold, number), [whole], x)
    expected, (others,) = folded(fold, [alone], x)
    assert torch.equal(out, expected)
    for mine, theirs in zip((*grads.src, *grads.dst), (*others.src, *others.dst), strict=True):
        assert torch.equal(mine, theirs)
    for mine, theirs in zip(grads.edge, others.edge, strict=True):
        assert torch.equal(mine[number == TYPES], theirs)
        assert not mine[number != TYPES].any()


@pytest.mark.parametrize(("fold", "x"), [FOLDS[0], FOLDS[3]], ids=["Sum", "Generic"])
def test_any_split_of_the_edges_gives_it(fold: Aggregator, x: Operands) -> None:
    """Also a part without an edge of the type."""
    other = (TYPES != 1).nonzero().flatten()
    mine = (TYPES == 1).nonzero().flatten()
    out, _ = folded(TypeFilteredFold(fold, 1), [block(other), block(mine[::2]), block(mine[1::2])], x)
    expected, _ = folded(TypeFilteredFold(fold, 1), [block(torch.arange(E))], x)
    assert torch.allclose(out, expected, rtol=0, atol=1e-14)
