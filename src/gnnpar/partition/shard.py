"""A rank's data under a partition. `Shard.open` is the only way to get it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor, nn

from gnnpar.comm import Communicator, RowLists
from gnnpar.comm.rows import PartEdges
from gnnpar.data.dataset import Dataset, Learned, content_hash
from gnnpar.data.links import OwnPairs
from gnnpar.data.raw import MASKS
from gnnpar.files import JsonDict, require_memory
from gnnpar.folds.block import Block, chosen
from gnnpar.folds.edge_data import EdgeData, EdgeKind, EdgeSizes
from gnnpar.graph import InEdges
from gnnpar.partition.learned import NODES, PIECE, initial_vectors
from gnnpar.partition.vertex_cut import copies_of
from gnnpar.placement import Placement
from gnnpar_kernels.csr import accumulate_dtype

_FEATURES = ("x", "edge_attr")
_ALL = slice(None)


@dataclass(frozen=True, eq=False)
class Shard:
    """One part: N inner nodes, the blocks of their in-edges, and the lists of a halo exchange.

    Shapes: node_ids [N] ascending global ids; x [N, F]; y [N] or [N, C]; masks [N]; in_degree [N] global, in the dtype
    of x; in_weight [N] the same with edge weights (fp64 until `to`), None without weights; type_degree [N, types]
    in-degrees by edge type, None without types.
    chunk_of [N], halo_chunk_of: the chunk of a row within its part, if parts are cut into `num_chunks`. Pipeline stages
    after the first hold features of width 0, stages before the last no labels and masks.
    halo[p]: the in-edges from part p, with the halo nodes of p by ascending global id as columns. boundary[p], shape
    [b]: the inner rows that p needs, in the order of its columns. copies: this rank's part of a vertex cut, if any.
    edge_attr [E, D]: attributes of all in-edges of its nodes, by ascending edge id. edge_sizes: of the whole graph,
    without degrees and loops. pairs: examples of link prediction with a source in this part. normalised: edge weights
    are w_ij d_i^-1/2 d_j^-1/2, with unchanged degrees. learned [N, d]: trained vectors of its nodes, created by `to`
    from `learns`; each row is on one rank.
    """

    part: int
    parts: int
    node_ids: Tensor
    x: Tensor
    y: Tensor
    train_mask: Tensor
    val_mask: Tensor
    test_mask: Tensor
    in_degree: Tensor
    inner: Block
    halo: dict[int, Block]
    boundary: dict[int, Tensor]
    halo_in_degree: Tensor  # halo nodes, parts in ascending order
    num_nodes: int  # of the whole graph, as are the next three
    num_train: int
    num_classes: int
    num_edges: int
    chunk_of: Tensor | None = None
    halo_chunk_of: Tensor | None = None  # halo nodes, parts in ascending order
    num_chunks: int = 1
    in_weight: Tensor | None = None
    halo_in_weight: Tensor | None = None  # halo nodes, parts in ascending order
    type_degree: Tensor | None = None
    edge_attr: Tensor | None = None
    edge_sizes: EdgeSizes = EdgeSizes()
    copies: Mirrors | None = None
    pairs: OwnPairs | None = None
    normalised: bool = False
    learns: Learned | None = None
    learned: nn.Parameter | None = None

    @property
    def num_inner(self) -> int:
        return len(self.node_ids)

    def inputs(self, rows: Tensor | slice = _ALL) -> Tensor:
        """Return the model's input of its nodes, or some rows: features, then trained vectors. [n, F + d]"""
        x = self.x if rows is _ALL else self.x[rows]
        return x if self.learned is None else torch.cat([x, self.learned[rows].to(x.dtype)], dim=1)

    @property
    def own_parameters(self) -> dict[str, nn.Parameter]:
        """Return the parameters that are only on this rank, by name."""
        return {} if self.learned is None else {f"{PIECE}{self.part}": self.learned}

    @property
    def own_weights(self) -> dict[str, Tensor]:
        """Return the values of `own_parameters` and the node ids of their rows, by name."""
        if self.learned is None:
            return {}
        return {f"{PIECE}{self.part}": self.learned.detach(), f"{NODES}{self.part}": self.node_ids}

    @property
    def peers(self) -> tuple[int, ...]:
        """Parts to exchange rows with, ascending."""
        return tuple(sorted(self.halo.keys() | self.boundary.keys()))

    @property
    def edge_kinds(self) -> frozenset[EdgeKind]:
        """Kinds of edge data."""
        return replace(self.inner.edges, attr=self.edge_attr).kinds

    @property
    def num_halo(self) -> dict[int, int]:
        """Number of halo rows received from each peer."""
        return {p: b.num_src for p, b in self.halo.items()}

    @cached_property
    def rows_of_split(self) -> dict[str, Tensor]:
        """Owned rows of each split; cached, since reading masks makes the host wait for the device."""
        masks = {"train": self.train_mask, "val": self.val_mask, "test": self.test_mask}
        return {split: mask.nonzero().flatten() for split, mask in masks.items()}

    @cached_property
    def edge_type(self) -> Tensor | None:
        """[E] types of all in-edges of its nodes, by ascending edge id, from the blocks; None without types."""
        found = [(b.edge_ids, b.types) for b in (self.inner, *self.halo.values())]
        ids, types = ([t for t in each if t is not None] for each in zip(*found, strict=True))
        return torch.cat(types)[torch.cat(ids).argsort()] if ids and types else None

    @cached_property
    def in_edges(self) -> InEdges:
        """In-edges of the inner rows by ascending edge id."""
        blocks = [self.inner, *self.halo.values()]
        own = [self.inner.indices.long(), *(torch.full_like(b.edge_dst, -1) for b in self.halo.values())]
        return edges_by_id(
            EdgeData.cat([b.edges for b in blocks]), torch.cat(own), torch.cat([b.edge_dst for b in blocks])
        )

    @property
    def row_lists(self) -> RowLists:
        """Return the description of the exchange that a codec needs."""
        read = {p: block.src_ids for p, block in self.halo.items() if block.src_ids is not None}
        edges = PartEdges(self.inner, self.halo, self.in_degree, self.halo_in_degree)
        return RowLists(self.part, self.parts, self.node_ids, self.boundary, read, edges)

    @property
    def halo_ids(self) -> Tensor:
        """Global ids of the halo nodes, parts in ascending order."""
        ids = [self.halo[p].src_ids for p in sorted(self.halo)]
        return torch.cat([i for i in ids if i is not None] or [self.node_ids[:0]])

    def narrowed(self, kept: Mapping[int, Tensor], boundary: dict[int, Tensor]) -> Shard:
        """Return the shard with some of the in-edges from other parts, and the halo nodes at their ends alone. Degrees
        stay. Shapes: kept: p -> bool of each edge of `halo[p]`."""
        halo, places, start = dict[int, Block](), [self.node_ids[:0]], 0
        for p in sorted(self.halo):
            block, columns = self.halo[p].restrict(kept[p]).compacted()
            if block.num_edges:
                halo[p] = block
            places.append(columns + start)
            start += self.halo[p].num_src
        at = torch.cat(places)
        return replace(
            self,
            halo=halo,
            boundary=boundary,
            halo_in_degree=self.halo_in_degree[at],
            halo_in_weight=chosen(self.halo_in_weight, at),
            halo_chunk_of=chosen(self.halo_chunk_of, at),
        )

    def to(self, device: torch.device, dtype: torch.dtype) -> Shard:
        """Move to a device: rows of features in `dtype`, other floating-point numbers in the type of its sums."""
        wide = accumulate_dtype(dtype)

        def type_of(name: str, value: Tensor) -> torch.dtype | None:
            return (dtype if name in _FEATURES else wide) if value.is_floating_point() else None

        tensors = {
            name: value.to(device, type_of(name, value))
            for name, value in vars(self).items()
            if isinstance(value, Tensor)
        }
        if self.learns is not None and self.learned is None:
            vectors = initial_vectors(self.node_ids, *self.learns).to(device, wide)
            tensors["learned"] = nn.Parameter(vectors)
        return replace(
            self,
            **tensors,
            inner=self.inner.to(device, wide),
            halo={p: b.to(device, wide) for p, b in self.halo.items()},
            boundary={p: i.to(device) for p, i in self.boundary.items()},
            copies=None if self.copies is None else self.copies.to(device, dtype),
            pairs=None if self.pairs is None else self.pairs.to(device),
        )

    @property
    def structure_nbytes(self) -> int:
        pairs = 0 if self.pairs is None else self.pairs.nbytes
        return pairs + sum(held.nbytes for held in (self.inner, *self.halo.values(), *self.boundary.values()))

    @property
    def features_nbytes(self) -> int:
        rows = (self.x, self.y, self.train_mask, self.val_mask, self.test_mask, self.in_degree, self.halo_in_degree)
        more = self.in_weight, self.halo_in_weight, self.type_degree, self.edge_attr
        return sum(t.nbytes for t in (*rows, self.node_ids, *more) if t is not None)

    @staticmethod
    def open(
        dataset: Dataset | None,
        part_of: Tensor | None,
        comm: Communicator,
        *,
        edge_ids: bool = False,
        placement: Placement | None = None,
    ) -> Shard:
        """Cut the dataset on rank 0 and send every rank its shard. Collective.

        dataset, part_of: needed on rank 0 only. comm: one rank per part, in order; with a `placement`, one per stage
        and part. edge_ids: keep global edge ids (attention dropout reads them).
        """
        shards = None
        mesh = (tuple(range(comm.size)),) if placement is None else placement.mesh
        if comm.rank == 0:
            assert dataset is not None
            assert part_of is not None
            parts = cut(dataset, part_of, len(mesh[0]), edge_ids=edge_ids)
            if placement is not None and placement.chunk_of is not None:
                parts = with_chunks(parts, placement.chunk_of)
            if placement is not None and placement.edge_part_of is not None:
                cuts = cut_nodes(dataset, part_of, placement.edge_part_of, len(parts), edge_ids=edge_ids)
                parts = [replace(part, copies=copies) for part, copies in zip(parts, cuts, strict=True)]
            stages = len(mesh)
            shards = [_of_stage(shard, s, stages) for s in range(stages) for shard in parts]
        shard = comm.scatter(shards)
        assert isinstance(shard, Shard)
        if len(mesh) == 1:
            comm_check(comm, shard)
        return shard


def _of_stage(shard: Shard, stage: int, stages: int) -> Shard:
    """Return the data of a stage: features in the first, labels in the last, structure everywhere."""
    if stage > 0:
        shard = replace(shard, x=shard.x[:, :0], learns=None)
    if stage < stages - 1:
        shard = replace(shard, **{name: vars(shard)[name][:0] for name in ("y", *MASKS)})
    return shard


def with_chunks(shards: list[Shard], chunk_of: Tensor) -> list[Shard]:
    """Set the chunk of every row in all shards. Shapes: chunk_of [num_nodes]."""
    num_chunks = int(chunk_of.max()) + 1
    return [
        replace(s, chunk_of=chunk_of[s.node_ids], halo_chunk_of=chunk_of[s.halo_ids], num_chunks=num_chunks)
        for s in shards
    ]


def comm_check(comm: Communicator, shard: Shard) -> None:
    """Raise the same ValueError on all ranks if two disagree on exchanged rows or on their degrees, which normalisation
    reads. Collective. Run before the first message, since a wrong size would abort gloo."""
    own = [t for t in (shard.node_ids, shard.in_degree, shard.in_weight) if t is not None]
    sent = {p: content_hash((t[rows] for t in own), label="rows") for p, rows in shard.boundary.items()}
    peers, halo = sorted(shard.halo), (shard.halo_ids, shard.halo_in_degree, shard.halo_in_weight)
    sizes = [shard.halo[p].num_src for p in peers]
    rows_of = zip(*(t.split(sizes) for t in halo if t is not None), strict=True)
    received = {p: content_hash(rows, label="rows") for p, rows in zip(peers, rows_of, strict=True)}
    everyone = comm.broadcast(comm.gather((shard.part, sent, received)))
    assert everyone is not None
    sent_by = {part: rows for part, rows, _ in everyone}
    for part, _, rows in everyone:
        for peer, digest in rows.items():
            if sent_by[peer].get(part) != digest:
                raise ValueError(f"parts {peer} and {part} disagree on the rows they exchange, or on their degrees")


def cut(dataset: Dataset, part_of: Tensor, parts: int, *, edge_ids: bool = False) -> list[Shard]:
    """Return all shards, by one stable sort of the edges by (destination part, source part), then slices."""
    src, dst = dataset.edge_index
    pair = part_of[dst] * parts + part_of[src]
    order = torch.argsort(pair, stable=True)  # inside a pair the order stays (dst, src)
    ends = torch.cat([pair.new_zeros(1), torch.bincount(pair, minlength=parts * parts).cumsum(0)]).tolist()
    node_ids = [(part_of == p).nonzero().flatten() for p in range(parts)]
    local_of = torch.empty_like(part_of)
    for ids in node_ids:
        local_of[ids] = torch.arange(len(ids), device=ids.device)
    blocks: dict[tuple[int, int], Block] = {}
    for p in range(parts):
        for q in range(parts):
            edges = order[ends[p * parts + q] : ends[p * parts + q + 1]]
            if p != q and not len(edges):
                continue
            if p == q:
                ids, columns = node_ids[p], local_of[src[edges]]
            else:
                ids, columns = torch.unique(src[edges], return_inverse=True)
            blocks[p, q] = Block.from_edges(
                local_of[dst[edges]],
                columns,
                num_dst=len(node_ids[p]),
                num_src=len(ids),
                src_ids=ids,
                edges=_held(dataset, edges, edge_ids=edge_ids),
                compress=p != q,
            )
    by_type = _degrees_by_type(dataset)
    shards = [_shard(dataset, p, parts, node_ids[p], local_of, blocks, by_type) for p in range(parts)]
    if (attr := dataset.edges.attr) is not None:
        mine = (order[ends[p * parts] : ends[(p + 1) * parts]].sort().values for p in range(parts))
        shards = [replace(shard, edge_attr=attr[edges]) for shard, edges in zip(shards, mine, strict=True)]
    return shards


def _degrees_by_type(dataset: Dataset) -> Tensor | None:
    """Return in-degrees by type, [num_nodes, types] in the dtype of x; None without types."""
    types, dst = dataset.edges.type, dataset.edge_index[1]
    if types is None:
        return None
    return _counted(dst, types, dataset.num_nodes, dataset.edge_sizes.types).to(dataset.x.dtype)


def degrees_by_type(blocks: Sequence[Block], types: int) -> Tensor:
    """Return in-degrees by type of the destinations of blocks with `types` types. Shapes: -> [num_dst, types] int64."""
    total = torch.zeros(blocks[0].num_dst, types, dtype=torch.int64, device=blocks[0].indptr.device)
    for block in blocks:
        assert block.types is not None
        total += _counted(block.edge_dst, block.types, block.num_dst, types)
    return total


def _counted(dst: Tensor, types: Tensor, num_dst: int, num_types: int) -> Tensor:
    what = f"a table of {num_dst} nodes by {num_types} types of edges"
    require_memory(3 * 8 * num_dst * num_types, what, "give fewer types")  # and its copies
    return torch.bincount(dst * num_types + types, minlength=num_dst * num_types).view(num_dst, num_types)


def _held(dataset: Dataset, edges: Tensor, *, edge_ids: bool) -> EdgeData:
    """Return the data of these edges for a block: all but attributes, which are rows of a shard."""
    held = replace(dataset.edges, ids=None, attr=None).at(edges)
    return replace(held, ids=edges if edge_ids else None)


@dataclass(frozen=True, eq=False)
class Mirrors:
    """One part of a vertex cut: its edges, and a copy of each of their nodes.

    `shard` owns all of its n nodes, with the in-degrees of the whole graph, and has no halo. Shapes: share [n]: share
    of a node's edges to other nodes, in both directions; a node's shares add up to 1. number [n]: copies of it.
    """

    shard: Shard
    share: Tensor
    number: Tensor

    def to(self, device: torch.device, dtype: torch.dtype) -> Mirrors:
        """Move to a device: rows of features in `dtype`, other floating-point numbers in the type of its sums."""
        share = self.share.to(device, accumulate_dtype(dtype))
        return Mirrors(self.shard.to(device, dtype), share, self.number.to(device))


def cut_nodes(
    dataset: Dataset, part_of: Tensor, edge_part_of: Tensor, parts: int, *, edge_ids: bool = False
) -> list[Mirrors]:
    """Return all parts of a vertex cut. A self loop is in every part with a copy of its node."""
    src, dst = dataset.edge_index
    apart, num_nodes = src != dst, dataset.num_nodes
    degree = torch.bincount(torch.cat([src[apart], dst[apart]]), minlength=num_nodes)
    held = copies_of(dataset.edge_index, part_of, edge_part_of, parts)
    number = torch.bincount(torch.cat(held), minlength=num_nodes)
    by_type = _degrees_by_type(dataset)
    found: list[Mirrors] = []
    for p, ids in enumerate(held):
        place = torch.full_like(part_of, -1)
        place[ids] = torch.arange(len(ids))
        mine = torch.where(apart, edge_part_of == p, place[dst] >= 0).nonzero().flatten()
        here = mine[apart[mine]]
        own = torch.bincount(torch.cat([src[here], dst[here]]), minlength=num_nodes)[ids]
        block = Block.from_edges(
            place[dst[mine]],
            place[src[mine]],
            num_dst=len(ids),
            num_src=len(ids),
            src_ids=ids,
            edges=_held(dataset, mine, edge_ids=edge_ids),
        )
        share = torch.where(degree[ids] > 0, own.double() / degree[ids].clamp_min(1), 1.0)
        shard = replace(
            _shard(dataset, 0, 1, ids, place, {(0, 0): block}, by_type), edge_attr=chosen(dataset.edges.attr, mine)
        )
        found.append(Mirrors(shard, share, number[ids]))
    return found


def split(shard: Shard, part_of: Tensor, parts: int) -> list[Shard]:
    """Split the single shard of a whole graph into shards of a partition."""
    return cut(whole_of(shard), part_of, parts, edge_ids=shard.inner.edge_ids is not None)


def whole_of(shard: Shard) -> Dataset:
    """Return the input of `cut` from the single shard of a whole graph, without its name, task and hashes."""
    assert shard.parts == 1, "only a whole graph can be cut"
    inner = shard.inner
    return Dataset(
        name="",
        x=shard.x,
        y=shard.y,
        edge_index=torch.stack([inner.indices.long(), inner.edge_dst]),
        in_degree=shard.in_degree,
        train_mask=shard.train_mask,
        val_mask=shard.val_mask,
        test_mask=shard.test_mask,
        num_classes=shard.num_classes,
        task="single_label",
        graph_hash="",
        split_hash="",
        edges=replace(inner.edges, ids=None, attr=shard.edge_attr),
        edge_sizes=shard.edge_sizes,
        in_weight=shard.in_weight,
    )


def _shard(
    dataset: Dataset,
    p: int,
    parts: int,
    ids: Tensor,
    local_of: Tensor,
    blocks: dict[tuple[int, int], Block],
    by_type: Tensor | None,
) -> Shard:
    halo = {q: blocks[p, q] for q in range(parts) if q != p and (p, q) in blocks}
    needed = {q: blocks[q, p].src_ids for q in range(parts) if q != p and (q, p) in blocks}
    halo_ids = torch.cat([b.src_ids for _, b in sorted(halo.items()) if b.src_ids is not None] or [ids[:0]])
    return Shard(
        part=p,
        parts=parts,
        node_ids=ids,
        **{name: vars(dataset)[name][ids] for name in ("x", "y", *MASKS)},
        in_degree=dataset.in_degree[ids].to(dataset.x.dtype),
        inner=blocks[p, p],
        halo=halo,
        boundary={q: local_of[rows] for q, rows in needed.items() if rows is not None},
        halo_in_degree=dataset.in_degree[halo_ids].to(dataset.x.dtype),
        num_nodes=dataset.num_nodes,
        num_train=int(dataset.train_mask.sum()),
        num_classes=dataset.num_classes,
        num_edges=dataset.num_edges,
        in_weight=chosen(dataset.in_weight, ids),
        halo_in_weight=chosen(dataset.in_weight, halo_ids),
        type_degree=chosen(by_type, ids),
        edge_sizes=dataset.edge_sizes._replace(degrees=(), loops=True),
        pairs=None if dataset.pairs is None else dataset.pairs.share(ids, local_of),
        learns=dataset.learned,
    )


def partition_statistics(dataset: Dataset, part_of: Tensor, parts: int) -> JsonDict:
    """Return the costs of a partition: nodes, edges and halo rows per part, cut edges, replication factor alpha.

    alpha = halo rows of all parts / N, the mean number of remote copies of a node. halo_from[i][j]: rows that part i
    reads from part j in an aggregation.
    """
    src, dst = dataset.edge_index
    source_part, target_part = part_of[src], part_of[dst]
    is_cut = source_part != target_part
    copies = torch.unique(target_part[is_cut] * dataset.num_nodes + src[is_cut])
    owner = part_of[copies % max(1, dataset.num_nodes)]
    rows = torch.bincount(copies // max(1, dataset.num_nodes) * parts + owner, minlength=parts * parts)
    edges = torch.bincount(target_part * parts + source_part, minlength=parts * parts)
    train = torch.bincount(part_of[dataset.train_mask], minlength=parts)
    nodes = torch.bincount(part_of, minlength=parts)
    return statistics_of(nodes, train, edges.view(parts, parts), rows.view(parts, parts))


def statistics_of(nodes: Tensor, train: Tensor, edges: Tensor, halo_from: Tensor) -> JsonDict:
    """Return `partition_statistics` from counts: nodes, train [P]; edges into i from j, and halo rows, [P, P]."""
    num_edges, cut_edges = int(edges.sum()), int(edges.sum() - edges.diagonal().sum())
    return {
        "parts": len(nodes),
        "nodes": nodes.tolist(),
        "edges": edges.sum(1).tolist(),
        "train_nodes": train.tolist(),
        "halo_rows": halo_from.sum(1).tolist(),
        "sent_rows": halo_from.sum(0).tolist(),
        "halo_from": halo_from.tolist(),
        "cut_edges": cut_edges,
        "cut_share": cut_edges / num_edges if num_edges else 0.0,
        "alpha": float(halo_from.sum() / max(1, int(nodes.sum()))),
    }


def edges_by_id(edges: EdgeData, source: Tensor, row: Tensor) -> InEdges:
    """Return in-edges in the order of edge operands. ValueError without ids. Shapes: source [E], row [E]."""
    if edges.ids is None:
        raise ValueError("edge operands need edge ids on the shard: give the model needs_edge_ids = True.")
    order = edges.ids.argsort()
    return InEdges(source[order], row[order], chosen(edges.weight, order), chosen(edges.type, order))
