"""Write the golden losses anew: `python tests/golden/make.py [STRATEGY ...]`, after a change of numerics."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("src", "kernels", "tests")]

import torch

from golden_runs import FOLDER, STRATEGIES, losses, pairs, short_losses, worlds_of, write_json

if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or STRATEGIES
    for strategy, model in pairs():
        if strategy in chosen:
            (FOLDER / f"{strategy}-{model}.txt").write_text("\n".join(map(repr, losses(strategy, model))) + "\n")
    for strategy in STRATEGIES:
        if strategy in chosen:
            write_json(strategy, {world: short_losses(strategy, world) for world in worlds_of(strategy)})
