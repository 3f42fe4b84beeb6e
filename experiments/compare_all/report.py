"""Tables and figures of every strategy side by side."""

import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

import blocks
import reports
from compare_all import cells, figures
from compare_all.cells import Row, Rows, by_cell
from compare_all.run import QUICK, STUDIES, TRIALS, TUNED, listed, num_runs
from markdown_it import MarkdownIt
from records import Files

from gnnpar.report import exports
from gnnpar.report.comparison import Comparison, compare
from gnnpar.report.exports import group_table
from gnnpar.report.formatting import interval
from gnnpar.report.page import write_page
from gnnpar.report.runs import collect
from gnnpar.report.statistics import Estimate, mean, non_inferiority

FIGURES = ("figure.svg", "datasets.svg", "target.svg", "rivals.svg", "deep.svg", "shares.svg")
TRIED = ("strategy", "as it comes", "tuned", "gain", "over single, both tuned", "verdict")
REHEARSED = "A rehearsal in small: these figures show that everything runs, and nothing else.\n"


def text(found: Mapping[str, Rows]) -> Iterable[str]:
    """What each strategy comes to over all studies, then a table a study."""
    timed = by_cell({name: rows for name, rows in found.items() if name.removeprefix("quick_") in cells.LINKS})
    over_seeds = by_cell({name: rows for name, rows in found.items() if trained(name)})
    yield "### At a glance\n"
    yield reports.table(cells.GLANCE, cells.glance(timed, over_seeds), rule=" --- |") + f"\n\n{cells.NOTE}"
    for title, base in (("over vanilla", "vanilla"), ("over the best exact or bf16 baseline", None)):
        if timed:
            yield f"### Epochs {title}: times faster, and the geometric mean over all cells\n"
            against = [base or cells.best_baseline(methods) for methods in timed.values()]
            heads = [f"{study} {model}, over {name}" for (study, model), name in zip(timed, against, strict=True)]
            yield reports.table(["strategy", *heads, "all"], cells.speedups(timed, base), rule=" --- |") + "\n"
    if over_seeds:
        yield "### Accuracy over all cells: not inferior to single by 0.3 points?\n"
        yield reports.table(cells.ACCURACY, cells.verdicts(over_seeds), rule=" --- |") + "\n"
    for name, rows in found.items():
        yield f"### {name}\n"
        if len(rows) < num_runs(name):
            yield f"{(STUDIES | QUICK)[name].note}; {len(rows)} of its {num_runs(name)} runs are here.\n"
        one = compared(name, rows)
        shown = exports.as_markdown(group_table(one.groups, one.baseline), exports.notes_of(one))
        yield trials(rows) if name in TRIALS else shown


def trained(name: str) -> bool:
    """Return True for a study over seeds without trials."""
    return "quiet" not in (STUDIES | QUICK)[name].needs and name not in TRIALS


def compared(name: str, rows: Rows) -> Comparison:
    """Return what `gnnpar compare` finds of these runs."""
    with tempfile.TemporaryDirectory() as folder:
        blocks.unpack(rows, Path(folder))
        return compare(collect([Path(folder)]), baseline="graph_parallel" if "paced" in name else "single")


def in_order(name: str, rows: Rows) -> Rows:
    """As the study lists its jobs, whatever was done first. Early lines of `accuracy` name the method alone."""
    place = {job: i for i, job in enumerate(listed(name))}

    def at(row: Row) -> tuple[int, int]:
        full = f"{row['result']['model']} {row['job']}"
        return place.get(row["job"], place.get(full, len(place))), row["block"]

    return sorted(rows, key=at)


def trials(rows: Rows) -> str:
    """Default and tuned rows, tuned ones held against `single` with as many trials (rule 14)."""

    def average(values: Iterable[float]) -> Estimate | None:
        return mean(found) if (found := list(values)) else None

    text = ""
    for (_, model), methods in by_cell({"tuned": rows}).items():
        lines = []
        for name in (name for name in methods if not name.endswith(TUNED)):
            ours, best = methods[name], methods.get(f"{name}{TUNED}", ())
            gap = cells.differences(best, methods.get(f"single{TUNED}", ()))
            shown = [interval(average(cells.points(each).values())) for each in (ours, best)]
            shown += [interval(average(each), signed=True) for each in (cells.differences(best, ours), gap)]
            verdict = "baseline" if name == "single" else non_inferiority(gap, 0.3) if gap else "-"
            lines.append([name, *shown, verdict])
        text += f"\n{model}:\n\n{reports.table(TRIED, lines)}\n"
    return text


def draw(found: Mapping[str, Rows], folder: Path, prefix: str) -> None:
    """Draw the figures of what was run: rivals and a deep model have methods of their own."""
    plain = {name.removeprefix("quick_"): rows for name, rows in found.items()}
    rest = [name for name in plain if trained(name) and name not in ("accuracy", "rivals", "deep")]
    at = {name: folder / f"{prefix}{name}" for name in FIGURES}
    figures.overview(plain, at["figure.svg"])
    for names, file in ((["rivals"], "rivals.svg"), (["deep"], "deep.svg"), (rest, "datasets.svg")):
        figures.datasets({name: plain[name] for name in names if name in plain}, at[file])
    figures.to_target({n: rows for n, rows in plain.items() if "target" in n}, at["target.svg"])
    if {"speed", "paced"} <= found.keys():
        figures.shares(found, at["shares.svg"])


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>gnnpar: every strategy side by side</title>
<style>body{font:15px system-ui;margin:2rem}table{border-collapse:collapse;font-size:13px}img{max-width:100%}
td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}</style>
"""


def write_pages(found: Mapping[str, Rows], said: str, folder: Path) -> None:
    """NAME.html a study, as `gnnpar compare --html` writes it; report.html leads to them, with figures and tables."""
    lines = ["# Every strategy side by side\n"]
    for name, rows in found.items():
        write_page(compared(name, rows), folder / f"{name}.html")
        note = f"{(STUDIES | QUICK)[name].note}, {len(rows)} of {num_runs(name)} runs"
        lines.append(f"- [{name}]({name}.html): {note}")
    lines += [f"\n![{name}]({name})" for name in FIGURES if (folder / name).exists()]
    page = MarkdownIt("commonmark", {"html": False}).enable("table").render("\n".join([*lines, "", said]))
    (folder / "report.html").write_text(f"{PAGE}{page}</html>\n", encoding="utf-8")
    (folder / "table.md").write_text(said, encoding="utf-8")


def report(files: Files, *, quick: bool = False, page: str = "") -> None:
    """Print the tables and draw the figures. quick: of the rehearsal. page: folder of report.html and table.md."""
    read = {name: files.read(name) for name in (QUICK if quick else STUDIES)}
    found = {name: in_order(name, rows) for name, rows in read.items() if rows}
    if not found:
        raise SystemExit(f"no lines of a study in {files.folder}; study.py run writes them")
    said = (REHEARSED if quick else "") + "\n".join(text(found))
    print(said)
    place = Path(page) if page else files.figure.parent
    place.mkdir(parents=True, exist_ok=True)
    draw(found, place, "quick_" * quick * (not page))
    if page:
        write_pages(found, said, place)
        print(f"pages -> {place / 'report.html'}")
