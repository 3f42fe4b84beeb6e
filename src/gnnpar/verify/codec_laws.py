"""Laws of codecs that strategies rely on: sizes known at both ends, equal numbers each time, correct labels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.codecs.codec import Codec, CodecConfig
from gnnpar.comm import Communicator, MessageTag, RowLike, ThreadWorld
from gnnpar.comm.communicator import Phase
from gnnpar.folds.block import Rows
from gnnpar.models.gcn import GCN
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Workload
from gnnpar.partition.partition import Random
from gnnpar.partition.shard import Shard
from gnnpar.verify.conformance import relative_error, small_graph, train_in_threads

WORLD = 3
SHAPES = ((12,), (2, 5), (3,))  # operands of one message: features, heads, scores


@dataclass(frozen=True)
class Law:
    """A checked law. seen: what was observed."""

    name: str
    passed: bool
    seen: str


class End(NamedTuple):
    """One rank's codec and its shard."""

    codec: Codec
    shard: Shard


def check_codec(config: CodecConfig) -> list[Law]:
    """Check every law on a small graph of three parts. A codec that raises breaks the current law."""
    laws = []
    for name, look in _LAWS.items():
        try:
            seen = look(config)
            laws.append(Law(name, True, seen))
        except Exception as error:  # a user's codec may raise anything: report it as a row of the table
            text = " ".join(str(error).split())
            laws.append(Law(name, False, text if isinstance(error, _Broken) else f"{type(error).__name__}: {text}"))
    return laws


class _Broken(Exception):
    """Raised with a description of the broken law."""


def _require(holds: bool, words: str) -> None:
    if not holds:
        raise _Broken(words)


def ends_of(config: CodecConfig) -> list[End]:
    """Return a codec on each of three ranks, in its first epoch."""
    data = small_graph()
    part_of = Workload(data, Random(), 1).part_of(WORLD)

    def end(comm: Communicator) -> End:
        shard = Shard.open(data if comm.rank == 0 else None, part_of, comm)
        codec = config.build(shard.row_lists, comm, 7)
        codec.begin_epoch(0)
        return End(codec, shard)

    return ThreadWorld(WORLD).run(end)


def messages(ends: Sequence[End], shapes: Sequence[tuple[int, ...]]) -> Iterator[tuple[int, int, Rows, Tensor]]:
    """Yield (sender, receiver, rows of the sender, index of the sent ones)."""
    gen = torch.Generator().manual_seed(0)
    for sender, (_, shard) in enumerate(ends):
        rows = tuple(torch.randn(shard.num_inner, *shape, generator=gen) * 10**i for i, shape in enumerate(shapes))
        for receiver, index in shard.boundary.items():
            yield sender, receiver, rows, index


def _message_tag(phase: Phase = "forward", first: int = 0) -> MessageTag:
    return MessageTag(0, 0, 0, phase, first=first)


def _sizes(config: CodecConfig) -> str:
    ends, total = ends_of(config), 0
    for sender, receiver, rows, index in messages(ends, SHAPES):
        for count in (1, len(SHAPES)):
            like, tag = RowLike.of(rows[:count]), _message_tag()
            buffer = ends[sender].codec.encode(rows[:count], index, tag, receiver)
            _require(
                buffer.dtype == torch.uint8 and buffer.ndim == 1,
                f"encode gives {buffer.dtype} {list(buffer.shape)}, not flat bytes",
            )
            told = ends[receiver].codec.nbytes(len(index), like, tag, sender)
            _require(told == len(buffer), f"nbytes says {told}, encode made {len(buffer)} bytes of {len(index)} rows")
            extra = ends[sender].codec.metadata_nbytes(len(index), like, tag, receiver)
            _require(0 <= extra <= told, f"metadata_nbytes says {extra} of {told} bytes")
            total += told
    return f"{total} bytes as announced"


def _travel(ends: Sequence[End], sender: int, receiver: int, rows: Rows, index: Tensor, phase: Phase) -> Rows:
    tag, like = _message_tag(phase), RowLike.of(rows)
    buffer = ends[sender].codec.encode(rows, index, tag, receiver)
    return ends[receiver].codec.decode(buffer, len(index), like, tag, sender)


def _shapes(config: CodecConfig) -> str:
    ends = ends_of(config)
    for sender, receiver, rows, index in messages(ends, SHAPES):
        for sent, got in zip(rows, _travel(ends, sender, receiver, rows, index, "forward"), strict=True):
            _require(
                got.shape == sent[index].shape and got.dtype == sent.dtype,
                f"{list(got.shape)} {got.dtype} came for {list(sent[index].shape)} {sent.dtype}",
            )
            _require(bool(got.isfinite().all()), "Inf or NaN came for finite rows")
    return "as sent, and finite"


def _repeatable(config: CodecConfig) -> str:
    first, again = ends_of(config), ends_of(config)
    for sender, receiver, rows, index in messages(first, SHAPES):
        mine = _travel(first, sender, receiver, rows, index, "forward")
        _require(_equal(mine, _travel(again, sender, receiver, rows, index, "forward")), "two runs send other numbers")
        remat = _travel(first, sender, receiver, rows, index, "remat")
        _require(_equal(mine, remat), "rows that are sent again (phase remat) are other numbers")
        known = first[sender].codec.as_received(rows, index, _message_tag(), receiver)
        _require(_equal(mine, known), "as_received is not what the peer decodes")
        cut = len(index) // 2
        parts = [
            first[receiver].codec.decode(
                first[sender].codec.encode(rows, index[a:b], _message_tag(first=a), receiver),
                b - a,
                RowLike.of(rows),
                _message_tag(first=a),
                sender,
            )
            for a, b in ((0, cut), (cut, len(index)))
        ]
        pieces = tuple(torch.cat(both) for both in zip(*parts, strict=True))
        _require(_equal(mine, pieces), "a message in two pieces is other numbers than in one")
    return "equal between runs, phases and pieces"


def _equal(first: Rows, second: Rows) -> bool:
    return all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def _labelled(config: CodecConfig) -> str:
    ends, worst = ends_of(config), 0.0
    for sender, receiver, rows, index in messages(ends, SHAPES[:1]):
        if len(index):
            got = _travel(ends, sender, receiver, rows, index, "forward")[0]
            worst = max(worst, relative_error(got, rows[0][index]))
    label = ", ".join(sorted(config.exactness))
    _require(bool(config.exactness), "exactness is empty; say exact, rounded, quantized, stale or sampled")
    _require(config.exactness != {"exact"} or worst == 0, f"it says exact, and is off by {worst:.1e}")
    return f"{label}; largest error {worst:.1e} of the largest entry"


def _trains(config: CodecConfig) -> str:
    data, model = small_graph(), GCN(hidden=8)
    exact = train_in_threads(Single(), model, data, world=1)
    strategies = {"graph_parallel": GraphParallel(codec=config), "sar": SAR(codec=config)}
    errors = []
    for name, strategy in strategies.items():
        runs = [train_in_threads(strategy, model, data, world=WORLD) for _ in range(2)]
        _require(runs[0].losses == runs[1].losses, f"strategy={name} trains to other losses the second time")
        _require(all(abs(loss) < float("inf") for loss in runs[0].losses), f"strategy={name}: a loss is Inf or NaN")
        key = "layers.0.conv.weight"
        errors.append(f"{relative_error(runs[0].gradients[0][key], exact.gradients[0][key]):.1e} under {name}")
    return f"gradient error {', '.join(errors)}"


def _evaluates(config: CodecConfig) -> str:
    data, model = small_graph(), GCN(hidden=8)
    exact = train_in_threads(Single(), model, data, world=1, epochs=0)
    got = train_in_threads(GraphParallel(codec=config), model, data, world=WORLD, epochs=0)
    error = relative_error(got.logits, exact.logits)
    _require(error < 1e-9, f"logits are off by {error:.1e} before any training")
    return f"logits differ by {error:.1e}"


_LAWS = {
    "both ends know every size": _sizes,
    "rows keep shape and type": _shapes,
    "the same rows are the same numbers": _repeatable,
    "it is as exact as it says": _labelled,
    "models train, twice the same": _trains,
    "evaluation is exact": _evaluates,
}
