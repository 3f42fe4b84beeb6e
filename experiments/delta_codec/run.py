"""codec=delta beside uniform bits: bytes, gradient error and accuracy by seed, without and with dropout.

python experiments/delta_codec/run.py       # results.jsonl, about 15 minutes
python experiments/delta_codec/report.py    # the tables of README.md
"""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

SEEDS = 5
DROPOUT = (0.0, 0.5)
CODECS = {
    "exact": [],
    "control": ["codec=drop"],
    **{f"uniform {bits}": ["codec=uniform", f"codec.bits={bits}"] for bits in (2, 4, 8)},
    **{f"delta {b}": ["codec=delta", f"codec.bits={b}", f"codec.least_bits={b}"] for b in (2, 4)},
    "delta 8 to 2": ["codec=delta"],
    "delta 8 to 1": ["codec=delta", "codec.least_bits=1"],
}
JOBS = {
    f"{name}, dropout {p:g}": [*overrides, f"model.dropout={p:g}"]
    for p in DROPOUT
    for name, overrides in CODECS.items()
}
COMMON = [
    "strategy=graph_parallel",
    "dataset=sbm",
    "model=gcn",
    "model.num_layers=3",
    "model.hidden=64",
    "world_size=2",
    "comm=threads",
    "threads_per_rank=1",
    "epochs=150",
    "eval_every=10",
    "fidelity_every=7",
    f"seed={','.join(map(str, range(SEEDS)))}",
]


def main() -> None:
    blocks.sweep(JOBS, common=COMMON, out=HERE / "results.jsonl")


if __name__ == "__main__":
    main()
