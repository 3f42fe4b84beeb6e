"""The table of rows.csv, above that of epochs."""

import csv

import reports
from records import Files


def before(files: Files, measured: object) -> str:
    """Return a line a graph and partitioner: rows under a cover as a share of halo rows, by parts; at four in full."""
    with (files.folder / "rows.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    of = {(row["graph"], row["partition"], int(row["parts"])): row for row in rows}
    parts, lines = sorted({int(row["parts"]) for row in rows}), []
    for graph, cut in dict.fromkeys((row["graph"], row["partition"]) for row in rows):
        found = [{key: int(of[graph, cut, p][key]) for key in ("rows", "partial_rows", "halo_rows")} for p in parts]
        shares = [f"{(row['rows'] + row['partial_rows']) / max(1, row['halo_rows']):.2f}" for row in found]
        four = of[graph, cut, 4]
        full = [four["halo_rows"], four["rows"], four["partial_rows"], four["least"] or "not counted"]
        lines.append([graph, cut, *shares, *full])
    heads = ("graph", "cut", *(f"{p} parts" for p in parts), "halo rows, 4 parts", "rows", "partial rows", "least")
    return f"### Rows\n\n{reports.table(heads, lines)}\n\n"
