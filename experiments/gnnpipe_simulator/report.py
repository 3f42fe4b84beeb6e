"""The table of README.md from results.jsonl: `python experiments/gnnpipe_simulator/report.py [FILE]`."""

import argparse
import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("file", nargs="?", type=Path, default=HERE / "results.jsonl")
    rows = [row for row in records.read(parser.parse_args().file) if row["kind"] == "cell"]
    if not rows:
        raise SystemExit("no cell is measured yet: run.py goes on where it was stopped")
    cells: dict[tuple, list[dict]] = {}
    for row in rows:
        cells.setdefault((row["layers"], row["chunks"], row["rate"]), []).append(row)
    print("| layers | K | link | predicted, ms | measured, ms | error | noise of the measurement |")
    print("|---|---|---|---|---|---|---|")
    errors, noises = [], []
    for (layers, chunks, rate), launches in sorted(cells.items(), key=lambda item: (*item[0][:2], item[0][2] or 1e9)):
        times = [row["epoch_seconds"]["median"] for row in launches]
        measured, predicted = statistics.median(times), launches[0]["predicted"]
        errors.append(predicted / measured - 1)
        noises.append((max(times) - min(times)) / 2 / measured)
        link = "loopback" if rate is None else f"{rate} Gbit/s"
        cell = f"{layers} | {chunks} | {link} | {1e3 * predicted:.1f} | {1e3 * measured:.1f}"
        print(f"| {cell} | {errors[-1]:+.1%} | {noises[-1]:.1%} |")
    middle, noise = statistics.median(map(abs, errors)), statistics.median(noises)
    print(f"| median of {len(cells)} cells | | | | | {middle:.1%} | {noise:.1%} |")


if __name__ == "__main__":
    main()
