"""Peak bytes of a rank in an epoch, in closed form. An element has 4 bytes."""

from __future__ import annotations

from gnnpar.pricing.price import Memory
from gnnpar.pricing.work import Work

NUMBER = 4.0


def rank_memory(work: Work, layers: range, p: int, *, columns: float, moving: float, chunks: int = 1) -> Memory:
    """Return the peak bytes of the rank of part p with these layers.

    `columns`: source rows kept for folds that read them in backward; `moving`: elements in flight at once.
    """
    ir, parts = work.ir, work.parts
    n, e, halo = parts.nodes[p], parts.edges(p), sum(parts.halo[p])
    params = sum(ir.params_of[i] for i in layers)
    first, last = layers.start == 0, layers.stop == ir.num_layers
    folds = [f for i in layers for f in ir.folds(i)]
    kept = 0.0
    if work.held != "no":
        kept += halo * ir.in_dim if work.held == "rows" else n * sum(f.out for f in ir.folds(0))
    kept += sum((columns - n) * f.width for f in folds if f.needs_src)
    dense = 2 * n * ir.widest / chunks
    reading = [((columns * f.width + n * f.out) / chunks, f.passing_numbers(e / chunks)) for f in folds if f.needs_src]
    attention = max([rows for rows, _ in reading], default=0)
    folding = max(map(sum, reading), default=0)  # slices of edges are freed before products
    carried = n * sum(ir.cuts[layers.start - 1]) if not first else 0.0
    carried += 2 * n * sum(ir.cuts[layers.stop - 1]) / chunks if not last else n * ir.final * 3
    ids = 2 * 8.0 * e * any(f.ids for f in ir.every_fold)  # by destination and by source
    return Memory(
        parameters=5 * NUMBER * params + 4 * NUMBER * n * ir.learned * first,
        structure=structure_bytes(n, e, halo) + ids,
        features=n * ir.in_dim * NUMBER * first + n * 20.0,
        saved=n * sum(ir.saved_of[i] for i in layers) * NUMBER,
        halo=kept * NUMBER,
        transient=(max(max(moving, dense) + attention, moving + folding) + carried) * NUMBER,
    )


def held_to_evaluate(work: Work, p: int) -> Memory:
    """Return the bytes of part p for a method that trains on other data and only evaluates on it: no gradients."""
    nodes, halo = work.parts.nodes[p], sum(work.parts.halo[p])
    blocks = NUMBER * work.parts.edges(p) + 12.0 * nodes + 8.0 * (halo + work.parts.sent(p))  # by destination alone
    return Memory(structure=blocks, features=nodes * (NUMBER * work.ir.in_dim + 20.0))


def widest_fold(work: Work, layers: range) -> int:
    """Return the elements of the widest source row."""
    return max([f.width for i in layers for f in work.ir.folds(i)], default=0)


def structure_bytes(n: float, e: float, halo: float) -> float:
    """Return the bytes of 32-bit CSR by destination and by source, 64-bit destinations of edges and lists of rows."""
    return 2 * 4.0 * (e + n + halo) + 8.0 * e + 2 * 8.0 * halo
