"""The table of README.md from results.jsonl: `python experiments/gnnpipe_simulator/report.py [FILE]`."""

import statistics
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records
import reports


def main() -> None:
    file = reports.asked(HERE, file="results.jsonl").file
    rows = [row for row in records.read(file) if row["kind"] == "cell"]
    if not rows:
        raise SystemExit("no cell is measured yet: run.py goes on where it was stopped")
    heads = ("layers", "K", "link", "predicted, ms", "measured, ms", "error", "noise of the measurement")
    lines, errors, noises = [reports.table(heads, [])], [], []
    rows.sort(key=lambda row: (row["layers"], row["chunks"], row["rate"] or 1e9))
    cells = reports.by(rows, lambda row: (row["layers"], row["chunks"], row["rate"]))
    for (layers, chunks, rate), launches in cells.items():
        times = [row["epoch_seconds"]["median"] for row in launches]
        measured, predicted = statistics.median(times), launches[0]["predicted"]
        errors.append(predicted / measured - 1)
        noises.append((max(times) - min(times)) / 2 / measured)
        link = "loopback" if rate is None else f"{rate} Gbit/s"
        cell = f"{layers} | {chunks} | {link} | {1e3 * predicted:.1f} | {1e3 * measured:.1f}"
        lines.append(f"| {cell} | {errors[-1]:+.1%} | {noises[-1]:.1%} |")
    middle, noise = statistics.median(map(abs, errors)), statistics.median(noises)
    lines.append(f"| median of {len(cells)} cells | | | | | {middle:.1%} | {noise:.1%} |")
    print("\n".join(lines))


if __name__ == "__main__":
    main()
