"""A key as a tensor, which a captured CUDA graph reads anew at every replay, draws the bits of the number."""

import pytest
import torch

import gnnpar_kernels as kernels
from gnnpar_kernels import fold_key
from gnnpar_kernels.dispatch import choose, functions_of
from gnnpar_kernels.hashing import key_tensor
from kernels.attention import DOT, GAT, V2, inputs, run

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


@pytest.mark.quick(4)
@pytest.mark.parametrize(("kind", "more"), [(GAT, {}), (GAT, {"branch": True}), (V2, {}), (DOT, {})], ids=str)
def test_attention(body, kit, kind, more):
    graph = kit.degree_graph()
    operands, grad_out = inputs(kind, graph, 2, 8, dtype=torch.float32)
    by_number, by_tensor = (
        run(kind, body, graph, kit.cut(graph, 2), operands, grad_out, (0.4, key), **more)
        for key in (KEYS[-1], key_tensor(KEYS[-1])[0])
    )
    assert all(torch.equal(*both) for both in zip(by_number, by_tensor, strict=True))


def test_ops_take_both(monkeypatch):
    """Through torch's dispatcher, by each body of a CPU."""
    ids, words = torch.arange(40), key_tensor(KEYS[-1])[0]
    for name in ("naive", "cpu"):
        monkeypatch.setenv("GNNPAR_KERNELS", name)
        assert choose("cpu", "dropout").body == name
        assert torch.equal(
            kernels.keep_mask(ids, 5, p=0.5, key=words), functions_of("naive").keep_mask(ids, 5, p=0.5, key=KEYS[-1])
        )
