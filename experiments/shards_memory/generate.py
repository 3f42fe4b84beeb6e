"""A block model with power-law degrees of any size, written in chunks as a folder for dataset=folder.

Node i lives in community i % communities, its rank there is i // communities, its expected degree falls with the square
root of the rank (p(d) ~ d^-3). A pair of nodes shares a community with probability `inside`. Classes are those of the
community, modulo their number; features are a direction of the class and noise. Memory is one chunk, whatever the size.
"""

from pathlib import Path

import numpy as np

from gnnpar.data.columns import ColumnWriter

CHUNK = 1 << 20


def generate(
    folder: Path,
    *,
    nodes: int,
    edges: int,
    features: int = 32,
    classes: int = 16,
    communities: int = 64,
    inside: float = 0.9,
    noise: float = 2.0,
    seed: int = 0,
) -> None:
    """`edges`: directed entries; half as many pairs are drawn, of which some hundredths coincide."""
    folder.mkdir(parents=True, exist_ok=True)
    rng = np.random.default_rng(seed)
    wide = np.int32 if nodes < 2**31 else np.int64
    rows = nodes // communities
    with ColumnWriter(folder / "src.npy", wide) as src, ColumnWriter(folder / "dst.npy", wide) as dst:
        for first in range(0, edges // 2, CHUNK):
            count = min(CHUNK, edges // 2 - first)
            community = rng.integers(communities, size=count)
            other = np.where(rng.random(count) < inside, community, rng.integers(communities, size=count))
            rank = (rng.random((2, count)) ** 2 * rows).astype(np.int64)
            src.write(rank[0] * communities + community)
            dst.write(rank[1] * communities + other)
    codes = rng.standard_normal((classes, features), dtype=np.float32)
    names = ("train", "val", "test")
    masks = {name: ColumnWriter(folder / f"{name}_mask.npy", bool) for name in names}
    with ColumnWriter(folder / "x.npy", np.float32, (features,)) as x, ColumnWriter(folder / "y.npy", np.int64) as y:
        for first in range(0, nodes, CHUNK // 16):
            label = np.arange(first, min(first + CHUNK // 16, nodes)) % communities % classes
            noisy = rng.standard_normal((len(label), features), dtype=np.float32)
            x.write(codes[label] + np.float32(noise) * noisy)
            y.write(label)
            draw = rng.random(len(label))
            for name, (low, high) in zip(names, ((0.0, 0.1), (0.1, 0.15), (0.15, 0.25)), strict=True):
                masks[name].write((draw >= low) & (draw < high))
    for mask in masks.values():
        mask.close()
