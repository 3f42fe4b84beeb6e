"""The table of README.md from results.jsonl: `python experiments/sar_out_of_core/report.py`."""

import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import records


def main() -> None:
    rows = records.read(HERE / "results.jsonl")
    base = rows[0]
    print("| run | limit | ends | s an epoch | times `single` | peak of tensors | resident | largest loss difference |")
    print("|---|---|---|---|---|---|---|---|")
    for row in rows:
        limit = f"{row['limit_bytes'] / 2**20:.0f} MiB" if row["limit_bytes"] else "none"
        if "losses" not in row:
            end = f"killed by signal {-row['exit']}" if row["exit"] < 0 else f"exit {row['exit']}: {row['said']}"
            print(f"| {row['what']} | {limit} | {end} | - | - | - | - | - |")
            continue
        seconds = row["epoch_seconds"]["mean"]
        slower = seconds / base["epoch_seconds"]["mean"]
        peak, resident = (max(row["memory_bytes"][key]) / 2**20 for key in ("peak", "peak_rss"))
        apart = max(abs(a / b - 1) for a, b in zip(row["losses"], base["losses"], strict=True))
        print(
            f"| {row['what']} | {limit} | completed | {seconds:.2f} | {slower:.2f} "
            f"| {peak:.0f} MiB | {resident:.0f} MiB | {apart:.1e} |"
        )


if __name__ == "__main__":
    main()
