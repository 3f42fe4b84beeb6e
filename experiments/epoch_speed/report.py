"""Epochs beside PyG's, and of two ranks beside one."""

import reports
from records import Files

NAMES = {"gcn": "GCN", "sage": "GraphSAGE", "gat": "GAT, 4 heads"}


def ratio(row: dict[str, str]) -> str:
    return f"{float(row['speedup']):.2f} ({float(row['low']):.2f} to {float(row['high']):.2f})"


def report(files: Files) -> None:
    rows = reports.read_csv(files().with_suffix(".csv"))
    of = {
        "model": lambda row: NAMES[row["model"]],
        "threads": lambda row: row["threads"],
        "`single`": lambda row: f"{float(row['single_seconds']):.3f} s",
        "PyG": lambda row: f"{float(row['other_seconds']):.3f} s",
        "PyG / `single` (range)": ratio,
        "peak above live, `single` / PyG": lambda row: (
            f"{float(row['single_mib']):.0f} / {float(row['other_mib']):.0f} MiB"
        ),
    }
    print(reports.columns(of, [row for row in rows if row["table"] == "pyg"]))
    ranks = {(row["model"], row["threads"]): row for row in rows if row["table"] == "ranks"}
    both = [(name, ranks[model, "1"], ranks[model, "2"]) for model, name in NAMES.items() if (model, "1") in ranks]
    lines = [[name, f"{float(one['other_seconds']):.3f} s", ratio(one), ratio(two)] for name, one, two in both]
    heads = ("model", "2 ranks x 1 thread", "faster than `single`, 1 thread", "than `single`, 2 threads")
    print("", reports.table(heads, lines), sep="\n")
