"""A key as a tensor, which a captured CUDA graph reads anew at every replay, draws the bits of the number."""

import pytest
import torch

import gnnpar_kernels as kernels
from gnnpar_kernels import fold_key
from gnnpar_kernels.dispatch import choose, functions_of
from gnnpar_kernels.hashing import key_tensor

KEYS = (0, 1, 2**31, 2**63, 2**64 - 1, fold_key(0, 1, 2))


def test_words_of_a_key_are_int32():
    words = key_tensor(*KEYS)
    assert (words.shape, words.dtype) == ((len(KEYS), 3), torch.int32)
    assert len({tuple(row) for row in words.tolist()}) == len(KEYS)
    assert key_tensor().shape == (0, 3)


@pytest.mark.parametrize("key", KEYS)
def test_masks_and_dropout(body, key):
    ids, x, words = torch.randint(-(2**63), 2**63 - 1, (100,)), torch.randn(100, 37), key_tensor(key)[0]
    assert torch.equal(body.keep_mask(ids, 37, p=0.4, key=words), body.keep_mask(ids, 37, p=0.4, key=key))
    assert torch.equal(body.dropout(x, ids, p=0.4, key=words), body.dropout(x, ids, p=0.4, key=key))


def test_another_key_in_the_same_place_is_another_mask(body):
    """What a replay does: the tensor is filled, and the same launch reads it."""
    ids, words = torch.arange(50), key_tensor(KEYS[0])[0]
    for key in KEYS:
        words.copy_(key_tensor(key)[0])
        assert torch.equal(body.keep_mask(ids, 9, p=0.5, key=words), body.keep_mask(ids, 9, p=0.5, key=key))


@pytest.mark.quick(2)
@pytest.mark.parametrize("branch", [False, True])
def test_attention(body, kit, branch):
    graph = kit.degree_graph()
    x, a_src, a_dst, y, a = (torch.randn(n, *s) for n, *s in ((60, 2, 8), (60, 2), (9, 2), (9, 2, 8), (2, 8)))
    grad_out, order = torch.randn(9, 2, 8), torch.argsort(graph.forward.indices, stable=True)
    found = []
    for key in (KEYS[-1], key_tensor(KEYS[-1])[0]):
        drop, csr, ids = (0.4, key), graph.forward[:2], {"edge_ids": graph.forward.edge_ids}
        how = {"slope": 0.2, "num_rows": 9, "drop": drop, **ids}
        state = body.attend(*csr, x, a_src, a_dst, **how, branch=branch)
        state = body.attend(*csr, x * 2, a_src, a_dst, **how, branch=branch, state=state)
        out, lse, *more = body.attend_finish(state)
        ends = (x, a_src, a_dst, out, lse, grad_out)
        grads = body.attend_grad(graph.forward, graph.reverse, *ends, slope=0.2, drop=drop)
        v2 = body.attend_finish(body.attend_v2(*csr, x, y, a, **how))
        delta = body.row_dots(v2[0], grad_out, dtype=v2[1].dtype)
        sides = (graph.forward, graph.reverse, order, x, y, a, v2[1], grad_out, delta)
        found.append((out, lse, *more, *grads, *v2, *body.attend_v2_grad(*sides, slope=0.2, drop=drop)))
        dot = body.attend_finish(body.attend_dot(*csr, x, 2 * x, y, num_rows=9, drop=drop, **ids))
        delta = body.row_dots(dot[0], grad_out, dtype=dot[1].dtype)
        sides = (graph.forward, graph.reverse, order, x, 2 * x, y, dot[1], grad_out, delta)
        found[-1] += (*dot, *body.attend_dot_grad(*sides, drop=drop))
    for by_number, by_tensor in zip(*found, strict=True):
        assert torch.equal(by_number, by_tensor)


def test_ops_take_both(monkeypatch):
    """Through torch's dispatcher, by each body of a CPU."""
    ids, words = torch.arange(40), key_tensor(KEYS[-1])[0]
    for name in ("naive", "cpu"):
        monkeypatch.setenv("GNNPAR_KERNELS", name)
        assert choose("cpu", "dropout").body == name
        assert torch.equal(
            kernels.keep_mask(ids, 5, p=0.5, key=words), functions_of("naive").keep_mask(ids, 5, p=0.5, key=KEYS[-1])
        )
