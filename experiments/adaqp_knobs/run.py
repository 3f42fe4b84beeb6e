"""AdaQP's knobs, one at a time: bytes, gradient error and accuracy by seed; what choosing bits takes, in time.

python experiments/adaqp_knobs/run.py          # seeds.jsonl, about 40 minutes, and times.jsonl, 10 on a quiet machine
python experiments/adaqp_knobs/run.py times    # one of them; times need root and iproute2
python experiments/adaqp_knobs/report.py       # tables and figure of README.md
"""

import argparse
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

CODEC = "codec@strategy.codec"
SEEDS = 5
JOBS = {
    "exact": ["strategy=graph_parallel"],
    "control": ["strategy=graph_parallel", "codec=drop"],
    **{f"uniform {bits}": ["strategy=adaqp", f"{CODEC}=uniform", f"strategy.codec.bits={bits}"] for bits in (2, 4, 8)},
    "random": ["strategy=adaqp", f"{CODEC}=random"],
    "adaptive": ["strategy=adaqp"],
    **{f"lambda {x}": ["strategy=adaqp", f"strategy.codec.variance_weight={x}"] for x in (0, 0.25, 0.75, 1)},
    **{f"group {n}": ["strategy=adaqp", f"strategy.codec.group_size={n}"] for n in (10, 100, 1000)},
    **{f"period {n}": ["strategy=adaqp", f"strategy.codec.period={n}"] for n in (5, 10, 50)},
    "paper's scores": [
        "strategy=adaqp",
        "strategy.codec.trace=range",
        "strategy.codec.importance=square_of_sum",
        "strategy.codec.scope=exchange",
    ],
}
COMMON = [
    "dataset=sbm_verdict",
    "model=gcn",
    "model.num_layers=3",
    "model.hidden=64",
    "world_size=2",
    "comm=threads",
    "threads_per_rank=1",
    "epochs=150",
    "eval_every=10",
    "fidelity_every=7",  # every phase of a period of 20
]

# of a group size, since the mixed-integer program grows with the number of groups
TIMES = {
    "thresholds, a row a group": [],
    "thresholds, 100 rows": ["strategy.codec.group_size=100"],
    "program, 100 rows": ["strategy.codec.group_size=100", "strategy.codec.solver=highs"],
    "program, 500 rows": ["strategy.codec.group_size=500", "strategy.codec.solver=highs"],
    "thresholds, period 5": ["strategy.codec.period=5"],
    "thresholds, period 50": ["strategy.codec.period=50"],
}
TIMED = [
    "dataset=sbm",
    "dataset.num_nodes=20000",
    "dataset.num_features=128",
    "model=gcn",
    "model.num_layers=3",
    "model.hidden=128",
    "strategy=adaqp",
    "world_size=2",
    "threads_per_rank=1",
    "launch=paced",
    "launch.hosts=2",
    "launch.rate_gbps=1",
    "epochs=102",
    "eval_every=102",
    "seed=0",
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", metavar="PART", help="seeds, times; default: both")
    asked = parser.parse_args().parts or ["seeds", "times"]
    if unknown := set(asked) - {"seeds", "times"}:
        parser.error(f"there is no part {', '.join(sorted(unknown))}; there are seeds and times")
    if "seeds" in asked:
        seeds = f"seed={','.join(map(str, range(SEEDS)))}"
        blocks.sweep(JOBS, common=[*COMMON, seeds], out=HERE / "seeds.jsonl")
    if "times" in asked:
        blocks.run(TIMES, blocks=range(5), common=TIMED, out=HERE / "times.jsonl", whole=True)


if __name__ == "__main__":
    main()
