"""The tables and figures of README.md from the JSONL files: `python experiments/compare_all/report.py`.

`--quick` reads the rehearsal's files, `--folder` another folder's; `--page FOLDER` also writes pages and table.md.
"""

import argparse
import html
import sys
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import blocks
import figures
import glance
import records
import reports
from cells import VERDICTS, Cells, Row, Rows, best_baseline, by_cell, differences, points, speedups, verdicts

from gnnpar.report import exports
from gnnpar.report.comparison import Comparison, compare
from gnnpar.report.exports import group_table
from gnnpar.report.formatting import interval
from gnnpar.report.page import write_page
from gnnpar.report.runs import collect
from gnnpar.report.statistics import mean, non_inferiority
from studies import QUICK, STUDIES, TRIALS, listed, num_runs

FIGURES = ("figure.svg", "datasets.svg", "target.svg", "rivals.svg", "deep.svg")
TIMED = ("speed", "paced", "quick_speed", "quick_paced")
TRIED = ("| strategy | as it comes | tuned | gain | over single, both tuned | verdict |", "|" + "---|" * 6)
ACCURACY = ("strategy", "cells", *VERDICTS, "unfit", "mean difference", "worst", "where the control is inferior")
NOTE = "A rehearsal in small: these figures show that everything runs, and nothing else.\n"


def text(found: Mapping[str, Rows]) -> Iterable[str]:
    """What each strategy comes to over all studies, then a table a study."""
    yield from over_all(
        by_cell({name: rows for name, rows in found.items() if name in TIMED}),
        by_cell({name: rows for name, rows in found.items() if trained(name)}),
    )
    for name, rows in found.items():
        yield f"### {name}\n"
        if len(rows) < num_runs(name):
            yield f"{(STUDIES | QUICK)[name].note}; {len(rows)} of its {num_runs(name)} runs are here.\n"
        yield "\n".join(trials(rows)) if name in TRIALS else markdown(compared(name, rows))


def trained(name: str) -> bool:
    """Return True for a study over seeds without trials."""
    return "quiet" not in (STUDIES | QUICK)[name].needs and name not in TRIALS


def compared(name: str, rows: Rows) -> Comparison:
    """Return what `gnnpar compare` finds of these runs."""
    with tempfile.TemporaryDirectory() as folder:
        blocks.unpack(rows, Path(folder))
        return compare(collect([Path(folder)]), baseline="graph_parallel" if "paced" in name else "single")


def markdown(found: Comparison) -> str:
    """Return a line for each configuration, and the notes."""
    return exports.as_markdown(group_table(found.groups, found.baseline), exports.notes_of(found))


def over_all(timed: Cells, trained: Cells) -> Iterable[str]:
    """All strategies at a glance; then speeds and verdicts by cell."""
    yield "### At a glance\n"
    yield reports.table(glance.HEADINGS, glance.lines(timed, trained), rule=" --- |") + "\n"
    yield glance.NOTE
    for title, base in (("over vanilla", "vanilla"), ("over the best exact or bf16 baseline", None)):
        if timed:
            yield f"### Epochs {title}: times faster, and the geometric mean over all cells\n"
            against = [base or best_baseline(methods) for methods in timed.values()]
            cells = [f"{study} {model}, over {name}" for (study, model), name in zip(timed, against, strict=True)]
            yield reports.table(["strategy", *cells, "all"], speedups(timed, base), rule=" --- |") + "\n"
    if trained:
        yield "### Accuracy over all cells: not inferior to single by 0.3 points?\n"
        yield reports.table(ACCURACY, verdicts(trained), rule=" --- |") + "\n"


def in_order(name: str, rows: Rows) -> Rows:
    """As the study lists its jobs, whatever was done first. Early lines of `accuracy` name the method alone."""
    place = {job: i for i, job in enumerate(listed(name))}

    def at(row: Row) -> int:
        names = row["job"], f"{row['result']['model']} {row['job']}"
        return next((place[name] for name in names if name in place), len(place))

    return sorted(rows, key=lambda row: (at(row), row["block"]))


def trials(rows: Rows) -> Iterable[str]:
    """Default and tuned rows, tuned ones held against `single` with as many trials (rule 14)."""
    for (_, model), methods in by_cell({"tuned": rows}).items():
        yield from ("", f"{model}:", "", *TRIED)
        for name in (name for name in methods if not name.endswith(", tuned")):
            ours, best = methods[name], methods.get(f"{name}, tuned", ())
            gap = differences(best, methods.get("single, tuned", ()))
            cells = [interval(mean(list(points(each).values()))) if each else "-" for each in (ours, best)]
            gain = differences(best, ours)
            cells += [interval(mean(each), signed=True) if each else "-" for each in (gain, gap)]
            verdict = "baseline" if name == "single" else non_inferiority(gap, 0.3) if gap else "-"
            yield f"| {name} | {' | '.join(cells)} | {verdict} |"
    yield ""


def draw(found: Mapping[str, Rows], file: Path) -> None:
    """figure.svg, and beside it those of datasets, of time to accuracy, of rivals and of a deep model, where these were
    run: the last two have methods of their own."""
    plain = {name.removeprefix("quick_"): rows for name, rows in found.items()}
    figures.overview(plain, file)
    others = {name: rows for name, rows in found.items() if trained(name) and "accuracy" not in name}
    for name, figure in (("rivals", FIGURES[3]), ("deep", FIGURES[4])):
        alone = {n: others.pop(n) for n in (name, f"quick_{name}") if n in others}
        figures.datasets(alone, file.with_name(figure))
    figures.datasets(others, file.with_name(FIGURES[1]))
    figures.to_target({n: rows for n, rows in plain.items() if "target" in n}, file.with_name(FIGURES[2]))


PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><title>gnnpar: every strategy side by side</title>
<style>body{font:15px system-ui;margin:2rem}table{border-collapse:collapse;font-size:13px}img{max-width:100%}
td,th{padding:.2rem .6rem;border-bottom:1px solid #ddd;text-align:left;white-space:nowrap}</style>
<h1>Every strategy side by side</h1>
"""


def write_pages(found: Mapping[str, Rows], said: str, folder: Path) -> None:
    """NAME.html a study, as `gnnpar compare --html` writes it; report.html leads to them, with figures and tables."""
    listed = ""
    for name, rows in found.items():
        write_page(compared(name, rows), folder / f"{name}.html")
        what = f"{html.escape((STUDIES | QUICK)[name].note)}, {len(rows)} of {num_runs(name)} runs"
        listed += f'<li><a href="{name}.html">{name}</a>: {what}</li>\n'
    drawn = "".join(f'<p><img src="{name}" alt="{name}">\n' for name in FIGURES if (folder / name).exists())
    page = f"{PAGE}<ul>\n{listed}</ul>\n{drawn}{as_html(said)}</html>\n"
    (folder / "report.html").write_text(page, encoding="utf-8")
    (folder / "table.md").write_text(said, encoding="utf-8")


def as_html(said: str) -> str:
    """Headings, tables and lines of the report."""
    parts, head = [], True
    for line in html.escape(said, quote=False).splitlines():
        if line.startswith("|"):
            cells, tag = line.strip("| ").split(" | "), "th" if head else "td"
            if not all(set(cell) <= set("-:|") for cell in cells):
                row = "".join(f"<{tag}>{cell}</{tag}>" for cell in cells)
                parts.append(f"{'<table>' if head else ''}<tr>{row}</tr>")
            head = False
            continue
        parts += [] if head else ["</table>"]
        head = True
        parts.append(f"<h2>{line[4:]}</h2>" if line.startswith("### ") else f"<p>{line}" if line else "")
    return "\n".join([*parts, *([] if head else ["</table>"])]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="of the rehearsal's lines")
    parser.add_argument("--folder", type=Path, default=HERE, help="of the raw lines (beside this file)")
    parser.add_argument("--figure", type=Path, help="the figure to draw (figure.svg beside the lines)")
    parser.add_argument("--page", type=Path, metavar="FOLDER", help="write report.html, a page a study, table.md")
    options = parser.parse_args()
    read = {name: records.read(options.folder / f"{name}.jsonl") for name in (QUICK if options.quick else STUDIES)}
    found = {name: in_order(name, rows) for name, rows in read.items() if rows}
    if not found:
        raise SystemExit(f"no lines of a study in {options.folder}; run.py writes them")
    said = (NOTE if options.quick else "") + "\n".join(text(found))
    print(said)
    if options.page:
        options.page.mkdir(parents=True, exist_ok=True)
    place = options.page or options.folder
    draw(found, options.figure or place / ("quick.svg" if options.quick and not options.page else FIGURES[0]))
    if options.page:
        write_pages(found, said, options.page)
        print(f"pages -> {options.page / 'report.html'}")


if __name__ == "__main__":
    main()
