"""Write the golden losses anew: `python tests/golden/make.py [STRATEGY ...]`, after a change of numerics."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("src", "kernels", "tests")]

import torch

from golden_runs import FILE, STRATEGIES, losses, recorded, runs, write

if __name__ == "__main__":
    torch.set_num_threads(1)
    chosen = sys.argv[1:] or STRATEGIES
    kept = recorded() if FILE.exists() else {}
    found = {s: kept[s] for s in STRATEGIES if s in kept and s not in chosen}
    for strategy, case in runs():
        if strategy in chosen:
            found.setdefault(strategy, {})[case] = losses(strategy, case)
    write(found)
