"""Covers: the halo rows that travel, and the destinations that are folded at their sources.

Every rank finds the covers of its own in-edges (`gnnpar.partition.cover`) and tells the owners of their sources which
edges to fold. So ranks share the work, and a graph from shards on disk needs nothing else.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from gnnpar.codecs.codec import CodecConfig
from gnnpar.comm import Communicator, RowLists, Site
from gnnpar.comm.clock import perf_counter
from gnnpar.comm.rows import PartEdges, row_nbytes
from gnnpar.files import JsonDict
from gnnpar.folds.block import Block, chosen
from gnnpar.folds.edge_data import EdgeData
from gnnpar.folds.mergeable import Mergeable
from gnnpar.parallel.cover.weights import WORTH, SplitFold, Weights, weights_of
from gnnpar.parallel.shape_trace import Use
from gnnpar.parallel.torch_types import unique
from gnnpar.partition.cover import least_cover
from gnnpar.partition.shard import Shard

_SETUP = Site(0, -1, 0, "setup")


@dataclass(frozen=True, eq=False)
class Cover:
    """A rank's part of a cover.

    `shard`: the part with the halo rows that travel alone. `block`: edges folded here for other ranks; its sources are
    the rows of this part, its destinations the partial rows of all readers, reader by reader (one unused row if there
    is none). `sent`: reader -> its partial rows. `into`: owner -> the inner rows of its partial rows, ascending; pairs
    row * types + type if `types` is not 0. `linear`: for linear folds alone. Shapes: ids [rows] global numbers of the
    partial rows, distinct from node ids; read_ids[q] of those from q.
    """

    shard: Shard
    block: Block
    sent: Mapping[int, Tensor]
    into: Mapping[int, Tensor]
    ids: Tensor
    read_ids: Mapping[int, Tensor]
    types: int = 0
    linear: bool = False

    @property
    def nbytes(self) -> int:
        """Return the bytes of structure in addition to the shard's."""
        lists = (*self.sent.values(), *self.into.values(), *self.read_ids.values(), self.ids)
        blocks = sum(block.nbytes for block in self.shard.halo.values()) + self.block.nbytes
        return blocks + sum(t.numel() * t.element_size() for t in (*lists, *self.shard.boundary.values()))

    @cached_property
    def row_lists(self) -> RowLists:
        """Return the lists of partial rows for a codec. Each row is read by one destination, with weight 1."""
        shard = self.shard
        read: dict[int, Block] = {}
        for q, at in self.into.items():
            ends = at // self.types if self.types else at, torch.arange(len(at), device=at.device)
            read[q] = Block.from_edges(*ends, num_dst=shard.num_inner, num_src=len(at), compress=True)
        ones = shard.in_degree.new_ones(sum(map(len, self.into.values())))
        edges = PartEdges(shard.inner, read, shard.in_degree, ones)
        return RowLists(shard.part, shard.parts, self.ids, self.sent, self.read_ids, edges)


class Covers(NamedTuple):
    """Covers by `Mergeable.partial_types`, their facts over all ranks, and whether unsplit folds remain."""

    covers: Mapping[int, Cover] = {}
    facts: JsonDict = {}
    rest: bool = True


def split_of(use: Use) -> SplitFold:
    """Return the messages of an aggregation that merges."""
    exact = [row_nbytes(rows[1:]) + row_nbytes(use.dst) for rows in (use.partial, use.back)]
    travels = (True, use.learned), (True, use.differentiated)
    return SplitFold(tuple(each.width for each in use.src), use.partial[0].width, (exact[0], exact[1]), *travels)


def make_covers(
    shard: Shard, uses: Sequence[Use], codec: CodecConfig, comm: Communicator, *, auto: bool, linear: bool
) -> Covers:
    """Return the covers of a model's aggregations.

    `auto`: only those that pay. `linear`: of linear folds alone. Collective.
    """
    began = perf_counter()
    covers: dict[int, Cover] = {}
    counts = torch.zeros(3, dtype=torch.float64)  # halo rows of all, those that travel, partial rows
    for types, weights in _by_types(uses, codec, linear=linear):
        cover = make_cover(shard, comm, weights, types=types, linear=linear)
        halo = [sum(each.num_halo.values()) for each in (shard, cover.shard)]
        mine = torch.tensor([*halo, sum(map(len, cover.into.values()))], dtype=torch.float64)
        found = comm.all_reduce(mine.to(comm.device)).cpu()
        before, after = found[0] * weights.row, found[1] * weights.row + found[2] * weights.partial
        if not auto or after <= WORTH * before:
            covers[types] = cover
            counts += found
    if not covers:
        return Covers()
    names = ("cover/halo_rows", "cover/rows", "cover/partial_rows")
    facts: JsonDict = {name: int(count) for name, count in zip(names, counts, strict=True)}
    rest = any(_types_of(use, linear=linear) not in covers for use in uses)
    return Covers(covers, {**facts, "time/cover_seconds": perf_counter() - began}, rest)


def _types_of(use: Use, *, linear: bool) -> int | None:
    """Return `partial_types` of an aggregation that may be split, else None."""
    agg = use.agg
    return agg.partial_types if use.partial and isinstance(agg, Mergeable) and (agg.linear or not linear) else None


def _by_types(uses: Sequence[Use], codec: CodecConfig, *, linear: bool) -> Iterator[tuple[int, Weights]]:
    of: dict[int, list[Use]] = {}
    for use in uses:
        if (types := _types_of(use, linear=linear)) is not None:
            of.setdefault(types, []).append(use)
    for types in sorted(of):
        itemsize = of[types][0].src[0].dtype.itemsize
        yield types, weights_of([split_of(use) for use in of[types]], codec, itemsize)


def make_cover(shard: Shard, comm: Communicator, weights: Weights, *, types: int = 0, linear: bool = False) -> Cover:
    """Find the least cover of this rank's halo blocks, and exchange with its peers the edges that they fold.
    Collective."""
    halo: dict[int, Block] = {}
    into: dict[int, Tensor] = {}
    read_ids: dict[int, Tensor] = {}
    told: dict[int, dict[str, Tensor]] = {}
    kept_columns: list[Tensor] = []
    start = 0
    for q in sorted(shard.halo):
        block = shard.halo[q]
        here, into[q], told[q] = _cut_block(block, weights, types)
        columns = told[q]["columns"]
        kept_columns.append(columns + start)
        start += block.num_src
        ids = shard.node_ids[into[q] // types] * types + into[q] % types if types else shard.node_ids[into[q]]
        read_ids[q] = told[q]["ids"] = ids + shard.num_nodes
        if here.num_edges:
            halo[q] = here
    heard = _swap(comm, told, sorted(shard.boundary))
    boundary = {p: shard.boundary[p][each["columns"]] for p, each in heard.items() if len(each["columns"])}
    kept = torch.cat([*kept_columns, shard.node_ids[:0]])
    rows = replace(
        shard,
        halo=halo,
        boundary=boundary,
        halo_in_degree=shard.halo_in_degree[kept],
        halo_in_weight=chosen(shard.halo_in_weight, kept),
        halo_chunk_of=chosen(shard.halo_chunk_of, kept),
    )
    block, sent, ids = _folded_here(shard, heard)
    into = {q: at for q, at in into.items() if len(at)}
    return Cover(rows, block, sent, into, ids, {q: read_ids[q] for q in into}, types, linear)


def _cut_block(block: Block, weights: Weights, types: int) -> tuple[Block, Tensor, dict[str, Tensor]]:
    """Split a halo block. Return the block of the rows that travel, the destinations that arrive folded, and tensors
    for the owner of the sources: the columns that travel, and the edges that it folds."""
    dst = block.edge_dst
    if types:
        dst = dst * types + (0 if block.types is None else block.types)
    found, number = unique(dst)
    folded = least_cover(
        number, block.indices.long(), len(found), block.num_src, weights=(weights.row, weights.partial)
    )
    there = folded[number]
    columns, place = unique(block.indices[~there].long())
    here = Block.from_edges(
        block.edge_dst[~there],
        place,
        num_dst=block.num_dst,
        num_src=len(columns),
        src_ids=None if block.src_ids is None else block.src_ids[columns],
        edges=block.edges.at(~there),
        compress=True,
    )
    order = there.nonzero().flatten()
    order = order[torch.argsort(number[order], stable=True)]
    edges = replace(block.edges.at(order), type=None) if types else block.edges.at(order)
    told: dict[str, Tensor] = {
        "columns": columns,
        "dst": (folded.cumsum(0) - 1)[number[order]],
        "src": block.indices[order].long(),
    }
    told |= {f"edge_{name}": t for name, t in edges.tensors.items()}
    return replace(here, ascends=block.ascends), found[folded], told


def _folded_here(shard: Shard, heard: Mapping[int, Mapping[str, Tensor]]) -> tuple[Block, dict[int, Tensor], Tensor]:
    """Return the block of edges folded for others, reader -> its partial rows, and the ids of the partial rows."""
    none = shard.node_ids[:0]
    sent: dict[int, Tensor] = {}
    dst, src, ids, edges = [none], [none], [none], list[EdgeData]()
    start = 0
    for p, each in heard.items():
        if not (count := len(each["ids"])):
            continue
        sent[p] = torch.arange(start, start + count, device=none.device)
        dst.append(each["dst"] + start)
        src.append(shard.boundary[p][each["src"]])
        ids.append(each["ids"])
        edges.append(EdgeData(**{name[5:]: t for name, t in each.items() if name.startswith("edge_")}))
        start += count
    if not sent:  # an inner edge, so that a user's functions are not called for no edge at all
        first = none.new_zeros(1 if shard.inner.num_edges else 0)
        dst, src, edges = [first], [shard.inner.indices[first].long()], [shard.inner.edges.at(first)]
    block = Block.from_edges(
        torch.cat(dst),
        torch.cat(src),
        num_dst=max(1, start),
        num_src=shard.num_inner,
        src_ids=shard.node_ids,
        edges=EdgeData.cat(edges),
    )
    return replace(block, ascends=shard.inner.ascends), sent, torch.cat(ids)


def _swap(
    comm: Communicator, told: Mapping[int, Mapping[str, Tensor]], readers: Sequence[int]
) -> dict[int, dict[str, Tensor]]:
    """Send tensors by name to peers, and return those of `readers`."""
    buffers = {q: _packed(tensors).to(comm.device) for q, tensors in told.items()}
    sizes = {q: torch.tensor([len(b)]).view(torch.uint8).to(comm.device) for q, b in buffers.items()}
    lengths = comm.exchange(sizes, dict.fromkeys(readers, 8), _SETUP)
    incoming = {p: int(lengths[p].wait().cpu().view(torch.int64)) for p in readers}
    pending = comm.exchange(buffers, incoming, _SETUP)
    heard = {p: _unpacked(pending[p].wait(), comm.device) for p in readers}
    comm.flush(keep=0)
    return heard


def _packed(tensors: Mapping[str, Tensor]) -> Tensor:
    file = io.BytesIO()
    torch.save({name: t.cpu().contiguous().clone() for name, t in tensors.items()}, file)
    return torch.frombuffer(bytearray(file.getvalue()), dtype=torch.uint8)


def _unpacked(buffer: Tensor, device: torch.device) -> dict[str, Tensor]:
    return torch.load(io.BytesIO(buffer.cpu().numpy().tobytes()), map_location=device, weights_only=True)
