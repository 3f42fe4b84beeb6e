"""The tables of README.md from rows.csv and results.jsonl: `python experiments/cover/report.py`."""

import csv
import sys
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).parent.resolve()
sys.path.insert(0, str(HERE.parent))

import blocks
from paired import Cells, milliseconds, peak_mib, share_percent, times_text


def rows_table() -> Iterator[str]:
    """A line a graph and partitioner: rows under a cover as a share of halo rows, by parts; at four parts in full."""
    with (HERE / "rows.csv").open(encoding="utf-8") as file:
        lines = list(csv.DictReader(file))
    of = {(line["graph"], line["partition"], int(line["parts"])): line for line in lines}
    parts = sorted({int(line["parts"]) for line in lines})
    heads = ["graph", "cut", *(f"{p} parts" for p in parts), "halo rows, 4 parts", "rows", "partial rows", "least"]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for graph, cut in dict.fromkeys((line["graph"], line["partition"]) for line in lines):
        found = [of[graph, cut, p] for p in parts]
        shares = [
            f"{(int(each['rows']) + int(each['partial_rows'])) / max(1, int(each['halo_rows'])):.2f}" for each in found
        ]
        four = of[graph, cut, 4]
        full = [f"{four[name]}" for name in ("halo_rows", "rows", "partial_rows")]
        yield "| " + " | ".join([graph, cut, *shares, *full, str(four["least"] or "not counted")]) + " |"


def place(job: str) -> tuple[str, int, str]:
    """Cells by name, then codecs from the most bits to the fewest, rows before cover."""
    cell, how = job.split("; ")
    codec, halo = how.split(", ")
    return cell, ("fp32", "bf16", "adaqp").index(codec), str(halo == "cover")


def times_table(cells: Cells) -> Iterator[str]:
    """A line a cell, codec and halo: rows of the same codec are the base."""
    heads = [
        "cell",
        "codec",
        "halo",
        "ms an epoch",
        "times rows",
        "times rows in fp32",
        "MiB sent",
        "share",
        "MiB of a rank",
    ]
    yield "| " + " | ".join(heads) + " |"
    yield "|---" * len(heads) + "|"
    for job in sorted(cells, key=place):
        cell, how = job.split("; ")
        codec, halo = how.split(", ")
        one = next(iter(cells[job].values()))["result"]
        bases = [times_text(cells, job, f"{cell}; {base}, rows") for base in (codec, "fp32")]
        sent = f"{(one['bytes_per_epoch']['forward'] + one['bytes_per_epoch']['backward']) / 2**20:.1f}"
        memory = [f"{share_percent(cells, job):.0f}%", f"{peak_mib(cells, job):.0f}"]
        yield "| " + " | ".join([cell, codec, halo, milliseconds(cells, job), *bases, sent, *memory]) + " |"


if __name__ == "__main__":
    print("### Rows", "", *rows_table(), "", sep="\n")
    if (HERE / "results.jsonl").exists() or list(HERE.glob("results.jsonl.*.xz")):
        print("### Epochs on debian", "", *times_table(blocks.by_job(HERE / "results.jsonl")), "", sep="\n")
