"""Rows in few bits, as messages: mean, variance and bound by the formulas, keys, sizes, and what must not pass.

codec=delta: the recursion of both ends against plain lines, bits that narrow, and what training makes of it."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from composing import configured
from gnnpar.codecs.adaptive.codec import Adaptive, row_variances
from gnnpar.codecs.codec import BFloat16, Codec, Drop, Identity
from gnnpar.codecs.delta import Delta
from gnnpar.codecs.quantized import QuantizedRows
from gnnpar.codecs.uniform import Random, Uniform
from gnnpar.comm import MessageTag, Outgoing, RowLike, ThreadWorld
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
from gnnpar_kernels.quantize.naive import dequantize_rows, quantize_rows, ranges
from gnnpar_kernels.wire import row_nbytes
from messages import Message

ROWS, WIDTH, DRAWS = 24, 256, 300
KINDS = {
    "normal": lambda: torch.randn(ROWS, WIDTH),
    "shifted": lambda: torch.randn(ROWS, WIDTH) + 3,
    "uniform": lambda: torch.rand(ROWS, WIDTH),
    "relu": lambda: torch.randn(ROWS, WIDTH).relu(),
}


def moments(message: Message, x: torch.Tensor, draws: int = DRAWS):
    """Mean error, its variance, and the largest error of every entry, over epochs."""
    errors = torch.stack([message.send((x,), epoch=epoch)[0] - x for epoch in range(draws)]).double()
    return errors.mean(0), errors.var(0, unbiased=False), errors.abs().amax(0)


@pytest.mark.quick(2)
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("kind", KINDS)
def test_messages_have_the_mean_and_the_variance_of_theory(kind, bits):
    torch.manual_seed(0)
    x = KINDS[kind]()
    mean, variance, worst = moments(Message(Uniform(bits=bits), ROWS), x)
    step = ranges(x, bits)[0].double()
    assert float((mean / step).square().mean().sqrt()) < 1.3 * 0.41 / math.sqrt(DRAWS)
    assert bool((worst < step * (1 + 1e-3)).all())
    rows = variance.sum(1)
    assert bool((rows <= WIDTH * step[:, 0] ** 2 / 4).all())
    exact = row_variances(x, (bits,), trace="exact")[:, 0]
    assert float((rows / exact - 1).abs().max()) < 0.1  # 300 draws of one row
    assert float(rows.sum() / exact.sum()) == pytest.approx(1.0, abs=0.02)
    proxy = float(rows.sum() / row_variances(x, (bits,), trace="range").sum())
    low, high = (0.45, 0.56) if kind == "relu" else (0.95, 1.04)
    assert low < proxy < high, "a row of zeros and positive numbers costs half of what its range says"


def test_every_operand_has_its_own_scale():
    torch.manual_seed(2)
    rows = 1e6 * torch.randn(ROWS, 2, 16), 1e-3 * torch.randn(ROWS, 4)
    x, scores = Message(Uniform(bits=4, score_bits=8), ROWS).send(rows)
    assert float((x - rows[0]).abs().max()) > 1e3
    assert float((scores - rows[1]).abs().max()) < 1e-3 * 8 / 255 * 1.01
    narrow = rows[0], torch.randn(ROWS, 1)
    assert torch.equal(Message(Uniform(bits=2), ROWS).send(narrow)[1], narrow[1]), "metadata would weigh more than fp32"


def test_noise_depends_on_what_a_message_is_about():
    torch.manual_seed(3)
    x = (torch.randn(ROWS, WIDTH),)
    same, other = Message(Uniform(bits=2), ROWS), Message(Uniform(bits=2), ROWS, seed=8)
    first = same.bytes_of(x)
    assert torch.equal(Message(Uniform(bits=2), ROWS).bytes_of(x), first), "equal between runs"
    assert torch.equal(same.bytes_of(x, phase="remat"), first), "rows that are sent again are the same numbers"
    tags: tuple[dict[str, Any], ...] = ({"epoch": 1}, {"layer": 1}, {"call": 1}, {"phase": "push"})
    for tag in tags:
        assert not torch.equal(same.bytes_of(x, **tag), first), tag
    assert not torch.equal(other.bytes_of(x), first)
    back = same.ends[1].encode(x, None, same.tag(phase="backward"), 0)  # the same nodes, sent by another rank
    assert not torch.equal(back, same.bytes_of(x, phase="backward"))
    back_error = same.ends[0].decode(back, ROWS, RowLike.of(x), same.tag(phase="backward"), 1)[0] - x[0]
    error = same.send(x)[0] - x[0]
    correlation = float((error * back_error).mean() / (error.std() * back_error.std()))
    assert abs(correlation) < 4 / math.sqrt(error.numel()), "independent between ranks"


@pytest.mark.parametrize("config", [Uniform(bits=4), Random()], ids=["uniform", "random"])
def test_pieces_and_what_the_sender_knows_of_them_are_the_same_numbers(config):
    torch.manual_seed(4)
    rows = torch.randn(ROWS, 40), torch.randn(ROWS, 4)
    message, like = Message(config, ROWS), RowLike.of(rows)
    whole = message.send(rows)
    pieces = []
    for first, last in ((0, 5), (5, 6), (6, ROWS)):
        tag = message.tag(first=first)
        buffer = message.ends[0].encode(rows, message.index[first:last], tag, 1)
        pieces.append(message.ends[1].decode(buffer, last - first, like, tag, 0))
    assert all(
        torch.equal(torch.cat(parts), rows) for parts, rows in zip(zip(*pieces, strict=True), whole, strict=True)
    )
    some = torch.tensor([1, 4, 5, 20])
    known = message.ends[0].as_received(rows, some, message.tag(phase="push")._replace(phase="forward"), 1)
    assert all(torch.equal(mine, theirs[some]) for mine, theirs in zip(known, whole, strict=True))


@pytest.mark.parametrize("bits", [1, 2, 4, 8, "bf16", "fp8", 32])
@pytest.mark.parametrize("width", [3, 100, 256])
def test_sizes_are_bits_and_metadata(bits, width):
    message, rows = Message(Uniform(bits=bits), ROWS), (torch.randn(ROWS, width), torch.randn(ROWS, 4))
    b: int = {"bf16": 16, "fp8": 8}.get(bits, bits)  # type: ignore[assignment]
    meta, score = 0 if b >= 16 else 4, 16 if bits == 32 else 8
    like = RowLike.of(rows)
    assert len(message.bytes_of(rows)) == ROWS * (4 * -(-width * b // 32) + meta + score)
    expected = ROWS * (meta + (0 if bits == 32 else 4))
    assert message.ends[0].metadata_nbytes(ROWS, like, message.tag(), 1) == expected


def test_gradients_have_bits_of_their_own():
    message, x = Message(Uniform(bits=2, gradient_bits=8), ROWS), (torch.randn(ROWS, 64),)
    assert len(message.bytes_of(x)) == ROWS * row_nbytes(64, 2)
    assert len(message.bytes_of(x, phase="backward")) == ROWS * row_nbytes(64, 8)
    assert Uniform(bits=32).exactness == {"exact"}
    assert Uniform(bits="bf16", score_bits="bf16").exactness == {"rounded"}
    assert Uniform(bits=32, gradient_bits=8).exactness == {"quantized"}


def test_random_bits_are_drawn_anew_every_period_and_known_to_both_ends():
    message, num_rows = Message(Random(period=3), 600), 600
    x = (torch.randn(num_rows, 16),)
    drawn = []
    for epoch in range(6):
        for end in message.ends:
            end.begin_epoch(epoch)
        buffer = message.bytes_of(x, epoch=epoch)
        drawn.append(len(buffer))
        message.send(x, epoch=epoch)
    assert len(set(drawn[:3])) == 1 and len(set(drawn[3:])) == 1
    assert drawn[0] != drawn[3]
    mean = sum(row_nbytes(16, b) for b in (2, 4, 8)) / 3
    assert drawn[0] / num_rows == pytest.approx(mean, rel=0.05)


@pytest.mark.parametrize("config", [Uniform(bits=4), Random()], ids=["uniform", "random"])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_a_row_that_is_not_finite_is_one_clear_line(config, value):
    x = torch.randn(ROWS, 16)
    x[3, 5] = value
    line = r"epoch 2, layer 1, forward: a row for rank 1 holds Inf or NaN .* optim.clip, or use codec=identity$"
    with pytest.raises(ValueError, match=line):
        Message(config, ROWS).bytes_of((x,), epoch=2, layer=1)


@pytest.mark.parametrize("config", [Uniform(bits=4), Random()], ids=["uniform", "random"])
def test_one_launch_for_all_peers_gives_the_bytes_of_one_a_peer(config):
    from gnnpar.partition.shard import cut
    from gnnpar.verify.conformance import small_graph

    data = small_graph()
    shard = cut(data, torch.arange(data.num_nodes) % 4, 4)[1]
    codec = config.build(shard.row_lists, ThreadWorld(4).communicators()[1], 3)
    rows = (torch.randn(shard.num_inner, 40),)
    for epoch in (0, 1):
        tag = MessageTag(epoch, 1, 0, "forward")
        together = codec.encode_all({p: Outgoing(rows, index) for p, index in shard.boundary.items()}, tag)
        assert list(together) == list(shard.boundary) and len(together) == 3
        for peer, index in shard.boundary.items():
            assert torch.equal(together[peer], codec.encode(rows, index, tag, peer))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("widths", [(40,), (3, 1), (2, 64, 9)])
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_a_price_is_the_bytes_that_both_ends_count(dtype, widths, phase):
    """The most, where bits are chosen in training; the mean over the menu, where they are drawn."""
    configs: list[Any] = [Identity(), BFloat16(), Drop(), Random(menu=(4,))]
    configs += [Uniform(bits=1), Uniform(bits=4, gradient_bits=8), Uniform(bits="fp8", gradient_bits=2)]
    configs += [Uniform(bits="bf16", gradient_bits=32), Uniform(bits=32)]
    like = RowLike.of([torch.zeros(ROWS, w, dtype=dtype) for w in widths])
    for config in configs:
        end, tag = Message(config, ROWS).ends[0], Message.tag(phase=phase)
        price = config.price(ROWS, widths, itemsize=dtype.itemsize, gradient=phase == "backward")
        assert price.nbytes == end.nbytes(ROWS, like, tag, 1), config
        assert price.metadata == end.metadata_nbytes(ROWS, like, tag, 1), config
        assert price.bound == ("mean" if isinstance(config, Random) else "exact")
    menu = [Uniform(bits=2), Uniform(bits=4), Uniform(bits=8)]
    menu = [config.price(ROWS, widths).nbytes for config in menu]
    assert Random(menu=(2, 4, 8)).price(ROWS, widths).nbytes == pytest.approx(sum(menu) / 3)
    adaptive = Adaptive(menu=(2, 4), first_bits=8).price(ROWS, widths)
    assert (adaptive.nbytes, adaptive.bits, adaptive.bound) == (menu[2], 8, "most")


NARROW, DECAY = 12, 0.25
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
    sender, receiver, (base, *_), index = next(messages(ends, ((NARROW,),)))
    moves = torch.randn(base.shape, generator=torch.Generator().manual_seed(1))
    moves[index[0]] *= 1000 * 4 ** torch.arange(NARROW)  # never comes to rest: it travels itself
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
            bits, reference = 8, torch.zeros(NARROW) if held is None else held[i]
            if held is not None and before is not None:
                moved, wide = held[i] - before[i], held[i]
                d, r = float(moved.max() - moved.min()), float(wide.max() - wide.min())
                if d >= r:
                    reference = torch.zeros(NARROW)
                else:
                    bits = min(b for b in (1, 2, 4, 8) if 255 * d <= (2**b - 1) * r or b == 8)
            noise = noise_of(ends[sender].codec, index, epoch, receiver)
            noise["ids"] = noise["ids"][i : i + 1]
            buffer = quantize_rows((row - reference)[None], None, bits, **noise)
            expected.append((bits, reference + dequantize_rows(buffer, bits, width=NARROW)[0]))
        rows = torch.stack([row for _, row in expected])
        assert torch.equal(got, rows), epoch
        assert nbytes == sum(row_nbytes(NARROW, bits) for bits, _ in expected)
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
        sender, receiver, (rows, *_), index = next(messages(ends, ((NARROW,),)))
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
    sender, receiver, (base, *_), index = next(messages(ends, ((NARROW,),)))
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
    assert results[0][1] == results[1][1] < len(index) * row_nbytes(NARROW, 8)
    floats = 2 * len(index) * NARROW * 4
    assert ends[sender].codec.held_nbytes == ends[receiver].codec.held_nbytes == floats + 2 * len(index)


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
