"""Predicted and measured epochs of a pipeline."""

import statistics

import reports
from records import Files


def report(files: Files) -> None:
    rows = [row for row in files.read() if row["kind"] == "cell"]
    heads = ("layers", "K", "link", "predicted, ms", "measured, ms", "error", "noise of the measurement")
    lines, errors, noises = [], [], []
    rows.sort(key=lambda row: (row["layers"], row["chunks"], row["rate"] or 1e9))
    cells = reports.by(rows, lambda row: (row["layers"], row["chunks"], row["rate"]))
    for (layers, chunks, rate), launches in cells.items():
        times = [row["epoch_seconds"]["median"] for row in launches]
        measured, predicted = statistics.median(times), launches[0]["predicted"]
        errors.append(predicted / measured - 1)
        noises.append((max(times) - min(times)) / 2 / measured)
        link = "loopback" if rate is None else f"{rate} Gbit/s"
        found = (f"{1e3 * predicted:.1f}", f"{1e3 * measured:.1f}", f"{errors[-1]:+.1%}", f"{noises[-1]:.1%}")
        lines.append([layers, chunks, link, *found])
    print(reports.table(heads, lines))
    middle, noise = statistics.median(map(abs, errors)), statistics.median(noises)
    print(f"| median of {len(cells)} cells | | | | | {middle:.1%} | {noise:.1%} |")
