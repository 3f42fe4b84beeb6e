"""Every candidate there is for a number of ranks: families, grids, chunks, knobs. Source: specs/tag.md 8.10 A."""

from __future__ import annotations

from collections.abc import Collection, Iterator

from gnnpar.planner.candidate import Candidate, Family, even_cuts
from gnnpar.pricing.ir import ModelIR

BITS = (16, 8, 4, 2)


def candidates(ir: ModelIR, ranks: int, *, families: Collection[Family], nodes: int) -> Iterator[Candidate]:
    """Of exactly `ranks` ranks. Pipelines have no more stages than layers and no chunk below 8 nodes."""
    if ranks == 1:
        yield Candidate(family="single")
        return
    if "graph_parallel" in families:
        for overlap in ("edges", "none"):
            yield Candidate(family="graph_parallel", parts=ranks, overlap=overlap)
        yield Candidate(family="graph_parallel", parts=ranks, bits=16)
    if "adaqp" in families:
        for bits in BITS[1:]:
            yield Candidate(family="adaqp", parts=ranks, bits=bits)
    if "sar" in families:
        attention = any(f.pushed for g in ir.groups for f in g.folds)
        refetches = any(f.needs_src for g in ir.groups for f in g.folds)
        for prefetch in (0, 1, 2):
            yield Candidate(family="sar", parts=ranks, prefetch=prefetch, remat=True)
        if attention:
            yield Candidate(family="sar", parts=ranks, backward="pull")
        if refetches:
            yield Candidate(family="sar", parts=ranks, remat=False)
    yield from _grids(ir, ranks, families, nodes)


def _grids(ir: ModelIR, ranks: int, families: Collection[Family], nodes: int) -> Iterator[Candidate]:
    for stages in (s for s in range(2, ranks + 1) if ranks % s == 0):
        parts = ranks // stages
        family: Family = "gnnpipe" if parts == 1 else "hybrid"
        if family not in families or stages > ir.num_layers:
            continue
        for chunks in (1, *(factor * stages for factor in (1, 2, 4, 8))):
            if chunks * parts * 8 <= nodes or chunks == 1:
                yield Candidate(
                    family=family, parts=parts, stages=stages, chunks=chunks, cuts=even_cuts(ir.num_layers, stages)
                )
