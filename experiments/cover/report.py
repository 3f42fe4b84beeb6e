"""The table of rows.csv, above that of epochs."""

import reports
from records import Files


def before(files: Files, measured: object) -> str:
    """Return a line a graph and partitioner: rows under a cover as a share of halo rows, by parts; at four in full."""
    rows = reports.read_csv(files.folder / "rows.csv")
    parts, lines = sorted({int(row["parts"]) for row in rows}), []
    for cell, mine in reports.by(rows, lambda row: (row["graph"], row["partition"])).items():
        of = {int(row["parts"]): row for row in mine}
        sent = {p: int(of[p]["rows"]) + int(of[p]["partial_rows"]) for p in parts}
        shares = [f"{sent[p] / max(1, int(of[p]['halo_rows'])):.2f}" for p in parts]
        full = [of[4]["halo_rows"], of[4]["rows"], of[4]["partial_rows"], of[4]["least"] or "not counted"]
        lines.append([*cell, *shares, *full])
    heads = ("graph", "cut", *(f"{p} parts" for p in parts), "halo rows, 4 parts", "rows", "partial rows", "least")
    return f"### Rows\n\n{reports.table(heads, lines)}\n\n"
