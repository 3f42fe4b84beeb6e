"""The ops as torch sees them: schemas that say what is changed, shapes for tracing, no silent loss of a gradient; keys.

A key as a tensor, which a captured CUDA graph reads anew at every replay, draws the bits of the number."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import gnnpar_kernels as kernels
from gnnpar_kernels import Csr, fold_key
from gnnpar_kernels.dispatch import choose, functions_of
from gnnpar_kernels.hashing import key_tensor
from kernels.attention import DOT, GAT, V2, inputs, run

KEY = 2**63 + 12345


def _inputs(kit) -> tuple[Csr, Csr, dict[str, torch.Tensor]]:
    graph = kit.degree_graph()
    n, m = graph.num_dst, graph.num_src
    tensors = {
        "x": torch.randn(m, 2, 4),
        "a_src": torch.randn(m, 2),
        "a_dst": torch.randn(n, 2),
        "y": torch.randn(n, 2, 4),
        "a": torch.randn(2, 4),
        "edge": torch.randn(len(graph.ids), 3),
        "near": torch.randn(n, 2, 3),
        "order": torch.argsort(graph.forward.indices, stable=True),
        "grad_out": torch.randn(n, 2, 4),
        "ids": torch.arange(m),
        "index": torch.tensor([3, 1, 7]),
    }
    return graph.forward, graph.reverse, tensors


def _everything(forward: Csr, reverse: Csr, t: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """A chain through every op, in-place forms included."""
    indptr, indices, edge_ids = forward.indptr, forward.indices, forward.edge_ids
    n, csr = t["a_dst"].shape[0], (indptr, indices)
    wide = {"slope": 0.2, "num_rows": n, "drop": (0.3, KEY), "edge_ids": edge_ids}
    found = []
    for branch in (False, True):
        state = kernels.attend(*csr, t["x"], t["a_src"], t["a_dst"], **wide, branch=branch)
        state = kernels.attend(*csr, t["x"] * 2, t["a_src"], t["a_dst"], **wide, state=state, branch=branch)
        found += list(kernels.attend_finish(state))
    out, lse = found[:2]
    sides = {"slope": 0.2, "drop": (0.3, KEY)}
    heads = (t["x"], t["a_src"], t["a_dst"], out, lse, t["grad_out"])
    found += kernels.attend_grad(forward, reverse, *heads, **sides)
    found += kernels.attend_grad_src(reverse.indptr, reverse.indices, *heads, **sides, edge_ids=reverse.edge_ids)
    found.append(kernels.attend_grad_dst(indptr, indices, *heads, **sides, edge_ids=edge_ids))
    found.append(kernels.attend_grad_dst_of(t["grad_out"], out, found[5], found[4], slope=0.2))
    found.append(kernels.row_dots(out, t["grad_out"], dtype=torch.float64))
    block = {"slope": 0.2, "num_rows": n, "drop": (0.3, KEY), "edge_ids": edge_ids}
    state = kernels.attend_v2(*csr, t["x"], t["y"], t["a"], **block)
    out, lse = kernels.attend_finish(kernels.attend_v2(*csr, t["x"] * 2, t["y"], t["a"], **block, state=state))
    ends = (lse, t["grad_out"], kernels.row_dots(out, t["grad_out"], dtype=lse.dtype))
    found += [out, *kernels.attend_v2_grad(forward, reverse, t["order"], t["x"], t["y"], t["a"], *ends, **sides)]
    del block["slope"]
    rows = t["x"], t["x"] * 2, t["y"]
    beside: list[dict[str, Any]] = [{}, {"edge": t["edge"], "edge_query": t["near"]}]
    for given in beside:
        state = kernels.attend_dot(*csr, *rows, **block, **given)
        out, lse = kernels.attend_finish(kernels.attend_dot(*csr, *rows, **block, **given, state=state))
        grad = torch.cat([t["grad_out"], t["near"]], -1) if given else t["grad_out"]
        ends = (lse, grad, kernels.row_dots(out, grad, dtype=lse.dtype))
        more = {"drop": (0.3, KEY), **given, "of_edge": bool(given)}
        found += [out, *kernels.attend_dot_grad(forward, reverse, t["order"], *rows, *ends, **more)]
    total = kernels.spmm(*csr, t["x"], num_rows=n)
    found.append(kernels.spmm(*csr, t["x"], num_rows=n, out=total))
    found.append(kernels.spmm(*csr, t["x"], num_rows=n, weights=t["x"].new_ones(indices.shape[0])))
    flat = t["x"].flatten(1)
    found += [kernels.dense(flat, flat[:5]), kernels.dense(flat, flat[:5], bias=flat[0, :5], add=flat[:, :5])]
    best = kernels.extremum(*csr, t["x"], t["ids"], num_rows=n)
    best = kernels.extremum(*csr, t["x"] + 0.1, t["ids"], num_rows=n, state=best)
    found += [kernels.extremum_finish(best), kernels.extremum_grad(best[1], t["ids"], t["grad_out"])]
    rows = kernels.gather_rows(t["x"], t["index"])
    found += [rows + 0, kernels.gather_rows(t["x"] * 3, t["index"], out=rows)]
    found.append(kernels.scatter_add_rows_(t["x"] * 1, t["index"], rows))
    keep = kernels.keep_mask(t["ids"], 8, p=0.4, key=KEY)
    found += [kernels.dropout(t["x"], t["ids"], p=0.4, key=KEY), kernels.apply_mask(t["x"].flatten(1), keep, p=0.4)]
    buffer = kernels.quantize_rows(t["x"].flatten(1), t["index"], 4, ids=t["index"], key=KEY)
    found += [buffer, kernels.dequantize_rows(buffer, 4, width=8)]
    return found


@pytest.mark.parametrize("name", ["cpu", "naive"])
def test_ops_compile_without_a_break(kit, name, monkeypatch):
    monkeypatch.setenv("GNNPAR_KERNELS", name)
    forward, reverse, tensors = _inputs(kit)
    expected = _everything(forward, reverse, tensors)
    compiled = torch.compile(_everything, fullgraph=True, backend="aot_eager")
    for got, reference in zip(compiled(forward, reverse, tensors), expected, strict=True):
        assert torch.equal(got, reference)


def test_schemas_tell_the_truth(kit, monkeypatch):
    """torch's own check of every registered op: aliases, mutations, shapes under tracing, no autograd."""
    calls = []
    for name in dir(torch.ops.gnnpar_kernels):
        packet = getattr(torch.ops.gnnpar_kernels, name)
        if isinstance(packet, torch._ops.OpOverloadPacket):
            calls.append(name)
    seen = set()

    class Record(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if func.namespace == "gnnpar_kernels" and func not in seen:
                seen.add(func)
                recorded.append((func, [_copy(a) for a in args]))
            return func(*args, **(kwargs or {}))

    recorded = []
    with Record():
        _everything(*_inputs(kit))
    assert {func._schema.name.split("::")[1] for func, _ in recorded} == set(calls)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_static")
    for func, args in recorded:
        torch.library.opcheck(func, tuple(args), test_utils=tests)


def _copy(value):
    if isinstance(value, torch.Tensor):
        return value.clone()
    return [_copy(v) for v in value] if isinstance(value, list) else value


def test_a_tensor_that_asks_for_a_gradient_is_refused(kit):
    forward, _, tensors = _inputs(kit)
    x = tensors["x"].requires_grad_()
    with pytest.raises(RuntimeError, match=r"spmm records no gradient: call it inside an autograd.Function"):
        kernels.spmm(forward.indptr, forward.indices, x, num_rows=9)
    with torch.no_grad():
        assert kernels.spmm(forward.indptr, forward.indices, x, num_rows=9).shape == (9, 2, 4)


KEYS = (0, 1, 2**31, 2**63, 2**64 - 1, fold_key(0, 1, 2))


def test_words_of_a_key_are_int32():
    words = key_tensor(*KEYS)
    assert (words.shape, words.dtype) == ((len(KEYS), 3), torch.int32)
    assert len({tuple(row) for row in words.tolist()}) == len(KEYS)
    assert key_tensor().shape == (0, 3)


@pytest.mark.parametrize("key", KEYS)
def test_masks_with_a_tensor_as_key_are_those_of_the_number(body, key):
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
def test_attention_with_a_tensor_as_key_has_the_bits_of_the_number(body, kit, kind, more):
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
