"""A point of the strategy space: family, grid, knobs. What a search moves through and a cost model prices.

Source: specs/tag.md 8.3. The family follows from the grid: one stage is graph parallelism (or SAR), one part a
pipeline, both more than one hybrid. `fields` is what its strategy's YAML is given, so that a plan of it is the
strategy's own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Quality = Literal["exact", "rounded", "quantized", "stale"]
QUALITIES: tuple[Quality, ...] = ("exact", "rounded", "quantized", "stale")
Family = Literal["single", "graph_parallel", "adaqp", "sar", "gnnpipe", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """`chunks`: of one part. `bits`: of rows on the wire between parts or stages. `cuts`: stage -> first layer.
    `held`: layer 0's halo is not received again (first_layer=cached).
    """

    family: Family
    parts: int = 1
    stages: int = 1
    chunks: int = 1
    bits: int = 32
    overlap: Literal["none", "edges"] = "edges"
    prefetch: int = 1
    backward: Literal["push", "pull"] = "push"
    remat: bool = True
    held: bool = False
    cuts: tuple[int, ...] = (0,)

    @property
    def ranks(self) -> int:
        return self.parts * self.stages

    @property
    def may_hold(self) -> bool:
        return self.family in ("graph_parallel", "adaqp") and self.parts > 1

    @property
    def quality(self) -> frozenset[Quality]:
        """The classes a user must have allowed."""
        found: set[Quality] = set()
        if self.bits == 16:
            found.add("rounded")
        elif self.bits < 16:
            found.add("quantized")
        if self.chunks > 1:
            found.add("stale")
        return frozenset(found or {"exact"})

    @property
    def engine(self) -> str:
        """What runs it, as `Rates.visits` has it."""
        if self.family == "graph_parallel" and self.bits == 16:
            return "rounded"
        if self.family in ("gnnpipe", "hybrid"):
            return "chunks" if self.chunks > 1 else "stages"
        return self.family

    @property
    def fields(self) -> dict[str, Any]:
        """Overrides of the strategy's YAML. A codec is (name, its fields)."""
        if self.family in ("single",):
            return {}
        codec = _codec(self.bits)
        if self.family in ("graph_parallel", "adaqp"):
            return {"codec": codec, "overlap": self.overlap}
        if self.family == "sar":
            return {"codec": codec, "prefetch": self.prefetch, "backward": self.backward, "remat": self.remat}
        chunks: int | str = self.chunks * self.parts if self.chunks > 1 else "one"
        return {"stages": self.stages, "parts": self.parts, "chunks": chunks, "boundary": codec}

    @property
    def label(self) -> str:
        """'hybrid 2 x 2, 4 chunks a part, 8 bit'."""
        words = [self.family]
        if self.family in ("gnnpipe", "hybrid"):
            words[0] += f" {self.stages} x {self.parts}" if self.family == "hybrid" else f" {self.stages} stages"
            words.append(f"{self.chunks} chunks" if self.chunks > 1 else "1 chunk")
        if self.family in ("graph_parallel", "adaqp") and self.overlap == "none":
            words.append("no overlap")
        if self.family == "sar":
            words.append(f"prefetch {self.prefetch}, {self.backward}" + ("" if self.remat else ", kept"))
        if self.bits != 32:
            words.append(f"{self.bits} bit")
        if self.held:
            words.append("first layer held")
        return ", ".join(words)


def _codec(bits: int) -> Mapping[str, Any]:
    """A codec as its YAML has it."""
    if bits == 32:
        return {"_target_": "gnnpar.codecs.codec.Identity"}
    if bits == 16:
        return {"_target_": "gnnpar.codecs.codec.BFloat16"}
    return {"_target_": "gnnpar.codecs.uniform.Uniform", "bits": bits, "gradient_bits": None, "score_bits": 8}


def even_cuts(num_layers: int, stages: int) -> tuple[int, ...]:
    """First layers of stages of equal length; the first ones have one more where they differ."""
    size, more = divmod(num_layers, stages)
    return tuple(s * size + min(s, more) for s in range(stages))


def layers_of(cuts: tuple[int, ...], num_layers: int) -> tuple[range, ...]:
    return tuple(range(a, b) for a, b in zip(cuts, (*cuts[1:], num_layers), strict=True))
