"""codec=delta: the recursion of both ends against plain lines, bits that narrow, and what training makes of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from composing import configured
from gnnpar.codecs.codec import Codec, Identity
from gnnpar.codecs.delta import Delta
from gnnpar.codecs.quantized import Key, QuantizedRows
from gnnpar.codecs.uniform import Uniform
from gnnpar.comm import MessageTag, RowLike
from gnnpar.models.gcn import GCN
from gnnpar.parallel.bns.strategy import BoundarySampling
from gnnpar.parallel.cagnet.strategy import Cagnet
from gnnpar.parallel.digest.strategy import Digest
from gnnpar.parallel.feature.strategy import FeatureParallel
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.pipegcn.strategy import PipeGCN
from gnnpar.parallel.pipeline.strategy import GNNPipe
from gnnpar.parallel.sancus.strategy import Sancus
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.verify.codec_laws import End, ends_of, messages
from gnnpar.verify.conformance import relative_error, small_graph, train_in_threads
from gnnpar_kernels.quantize.naive import dequantize_rows, quantize_rows
from gnnpar_kernels.wire import row_nbytes

WIDTH, DECAY = 12, 0.25
STILL = GCN(hidden=48, num_layers=3, dropout=0.0)


def rows_of(base: Tensor, moves: Tensor, epoch: int) -> Tensor:
    """Rows that come to rest: moves shrink to a quarter in each epoch."""
    return base + moves * DECAY**epoch


def sent(ends: list[End], sender: int, receiver: int, rows: Tensor, index: Tensor, epoch: int) -> tuple[Tensor, int]:
    """What arrives of rows[index], and in how many bytes."""
    tag = MessageTag(epoch, 0, 0, "forward")
    buffer = ends[sender].codec.encode((rows,), index, tag, receiver)
    told = ends[receiver].codec.nbytes(len(index), RowLike.of((rows,)), tag, sender)
    assert told == len(buffer), "the reader knows the bits without being told"
    known = ends[sender].codec.as_received((rows,), index, tag, receiver)[0]
    (got,) = ends[receiver].codec.decode(buffer, len(index), RowLike.of((rows,)), tag, sender)
    assert torch.equal(known, got)
    return got, told


def begin(ends: list[End], epoch: int) -> None:
    for end in ends:
        end.codec.begin_epoch(epoch)


def noise_of(codec: Codec, index: Tensor, epoch: int, peer: int) -> dict[str, Any]:
    assert isinstance(codec, QuantizedRows)
    tag = MessageTag(epoch, 0, 0, "forward")
    ids = codec.ids_of(index, len(index), tag, peer)
    return {"ids": ids, "key": codec.noise_key(tag, 0, codec.lists.part)}


def test_both_ends_follow_the_recursion_and_bits_narrow_with_differences() -> None:
    """Five epochs, row by row: h + Q(x - h), bits by the ranges of what was decoded, and a row that jumps."""
    config = Delta(bits=8, least_bits=1)
    ends = ends_of(config)
    sender, receiver, (base, *_), index = next(messages(ends, ((WIDTH,),)))
    moves = torch.randn(base.shape, generator=torch.Generator().manual_seed(1))
    moves[index[0]] *= 1000 * 4 ** torch.arange(WIDTH)  # never comes to rest: it travels itself
    held: Tensor | None = None
    before: Tensor | None = None
    bits_seen: list[set[int]] = []
    for epoch in range(5):
        begin(ends, epoch)
        x = rows_of(base, moves, epoch)
        x[index[0]] *= (-1) ** epoch
        got, nbytes = sent(ends, sender, receiver, x, index, epoch)
        expected = []
        for i, row in enumerate(x[index]):
            bits, reference = 8, torch.zeros(WIDTH) if held is None else held[i]
            if held is not None and before is not None:
                moved, wide = held[i] - before[i], held[i]
                d, r = float(moved.max() - moved.min()), float(wide.max() - wide.min())
                if d >= r:
                    reference = torch.zeros(WIDTH)
                else:
                    bits = min(b for b in (1, 2, 4, 8) if 255 * d <= (2**b - 1) * r or b == 8)
            noise = noise_of(ends[sender].codec, index, epoch, receiver)
            noise["ids"] = noise["ids"][i : i + 1]
            buffer = quantize_rows((row - reference)[None], None, bits, **noise)
            expected.append((bits, reference + dequantize_rows(buffer, bits, width=WIDTH)[0]))
        rows = torch.stack([row for _, row in expected])
        assert torch.equal(got, rows), epoch
        assert nbytes == sum(row_nbytes(WIDTH, bits) for bits, _ in expected)
        bits_seen.append({bits for bits, _ in expected})
        assert expected[0][0] == 8, "the row that jumps travels itself"
        held, before = rows, held
    assert bits_seen[0] == bits_seen[1] == {8}
    assert min(bits_seen[-1]) < 8, "differences are narrow by now"


def test_rounding_is_made_up_for_in_later_epochs() -> None:
    """Constant rows in fixed 2 bits: the error falls from epoch to epoch; uniform bits keep theirs."""
    errors = {}
    for config in (Delta(bits=2, least_bits=2), Uniform(bits=2)):
        ends = ends_of(config)
        sender, receiver, (rows, *_), index = next(messages(ends, ((WIDTH,),)))
        errors[type(config)] = []
        for epoch in range(8):
            begin(ends, epoch)
            got, _ = sent(ends, sender, receiver, rows, index, epoch)
            errors[type(config)].append(float((got - rows[index]).abs().max()))
    fed, plain = errors[Delta], errors[Uniform]
    assert fed[0] == plain[0], "the first epoch is that of uniform bits"
    assert fed[-1] < 0.01 * fed[0]
    assert min(plain) > 0.3 * plain[0]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "strategy", [GraphParallel(overlap="none"), GraphParallel(), SAR()], ids=["none", "edges", "sar"]
)
@pytest.mark.parametrize("model", ["gcn", "gat"])
def test_the_first_epoch_is_uniform_and_differences_as_they_are_are_exact(strategy: Any, model: str) -> None:
    config = configured("model", model, "model.hidden=8", "model.num_layers=3", "model.dropout=0.5")
    runs = {
        name: train_in_threads(replace(strategy, codec=codec), config, small_graph(), world=3, epochs=4)
        for name, codec in {
            "identity": Identity(),
            "differences": Delta(bits=32),
            "uniform": Uniform(bits=4),
            "delta": Delta(bits=4),
        }.items()
    }
    assert runs["differences"].losses == pytest.approx(runs["identity"].losses, rel=1e-12)
    assert relative_error(runs["differences"].logits, runs["identity"].logits) < 1e-10
    first, plain = runs["delta"].gradients[0], runs["uniform"].gradients[0]
    assert all(torch.equal(first[name], plain[name]) for name in plain)
    assert runs["delta"].losses[:1] == runs["uniform"].losses[:1]
    assert runs["delta"].losses != runs["uniform"].losses
    assert runs["delta"].traffic[0] == runs["uniform"].traffic[0]


@pytest.mark.slow
def test_a_run_without_dropout_sends_less_and_less() -> None:
    still, uniform = (
        train_in_threads(GraphParallel(codec=codec), STILL, small_graph(), world=3, epochs=12)
        for codec in (Delta(bits=8, least_bits=1), Uniform(bits=8))
    )
    exact = train_in_threads(GraphParallel(), STILL, small_graph(), world=3, epochs=12)
    sizes = [traffic["forward"] + traffic["backward"] for traffic in still.traffic]
    assert sizes[0] == sizes[1] == uniform.traffic[0]["forward"] + uniform.traffic[0]["backward"]
    assert sizes[-1] < 0.75 * sizes[0], sizes
    assert still.losses == pytest.approx(exact.losses, rel=0.02)


def test_what_is_held_is_saved_and_counted() -> None:
    """The other end of a codec that was loaded still knows all sizes and rows."""
    ends = ends_of(Delta())
    sender, receiver, (base, *_), index = next(messages(ends, ((WIDTH,),)))
    moves = torch.randn(base.shape, generator=torch.Generator().manual_seed(2))
    for epoch in range(5):
        begin(ends, epoch)
        sent(ends, sender, receiver, rows_of(base, moves, epoch), index, epoch)
    loaded = ends_of(Delta())
    for old, new in zip(ends, loaded, strict=True):
        new.codec.load_state_dict(old.codec.state_dict())
    results = []
    for each in (ends, loaded):
        begin(each, 5)
        results.append(sent(each, sender, receiver, rows_of(base, moves, 5), index, 5))
    assert torch.equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] < len(index) * row_nbytes(WIDTH, 8)
    floats = 2 * len(index) * WIDTH * 4
    assert ends[sender].codec.held_nbytes == ends[receiver].codec.held_nbytes == floats + 2 * len(index)


def test_a_reader_that_missed_an_epoch_is_noticed() -> None:
    """The control of the recursion: without the same rows at both ends what arrives is wrong."""
    ends = ends_of(Delta(bits=8, least_bits=8))
    sender, receiver, (base, *_), index = next(messages(ends, ((WIDTH,),)))
    begin(ends, 0)
    sent(ends, sender, receiver, base, index, 0)
    begin(ends, 1)
    held = ends[receiver].codec.state_dict()[Key(0, 0, "forward"), sender, False]
    assert held[0] is not None
    held[0].add_(1.0)
    tag, like = MessageTag(1, 0, 0, "forward"), RowLike.of((base,))
    buffer = ends[sender].codec.encode((base,), index, tag, receiver)
    (got,) = ends[receiver].codec.decode(buffer, len(index), like, tag, sender)
    assert float((got - base[index]).abs().min()) > 0.5


@pytest.mark.parametrize(
    ("strategy", "fields"),
    [
        (BoundarySampling, {"rate": 0.5}),
        (Cagnet, {}),
        (Digest, {"period": 2}),
        (FeatureParallel, {}),
        (GNNPipe, {}),
        (PipeGCN, {}),
        (Sancus, {}),
    ],
)
def test_strategies_that_send_other_rows_refuse_it_in_one_line(strategy: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"codec=delta sends each row as its difference.*but strategy=.*codec=uniform"):
        strategy(codec=Delta(), **fields)
    strategy(codec=Uniform(), **fields)


def test_more_least_bits_than_bits_are_refused() -> None:
    with pytest.raises(ValueError, match=r"codec.least_bits=8 is more than codec.bits=4; lower it"):
        Delta(bits=4, least_bits=8)
