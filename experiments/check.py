"""Pages hold what the raw lines say: tables, figures and quoted numbers.

    check.py tables [NAME ...]             # compare tables behind <!-- table N --> with NAME's report
    check.py quoted [--count N] [--seed S] # compare numbers of quoted.toml, drawn at random, with their cells
    check.py expected NAME [--list]        # compare a report, on stdin, with the ranges of expected.toml
    check.py measured                      # print the table of README.md: lines, machines, commits
    check.py renew COPY [NAME ...]         # take lines measured again, of studies that have ended in COPY/experiments

Exit code 1: something differs. `renew` puts lines of COPY/experiments in the place of those that are committed, packed,
and writes tables, figures, quoted numbers (in the texts and in quoted.toml) and the table of README.md anew. Sentences
are not read: their conclusions, places and dates, and all that is printed, are left to the author.
"""

import io
import random
import re
import shutil
import sys
import tempfile
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple  # Any: of JSON and TOML

import records
import study
from reports import table

HERE = Path(__file__).parent
EXPECTED, QUOTED = "expected.toml", "quoted.toml"
NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?")
BRACES = re.compile(r"\{([^{}]*)\}")
PLACE = re.compile(r"(<!-- table (\d+) -->\n\n)((?:\|.*\n?)*)")
DATE = re.compile(r"\b20\d\d-\d\d-\d\d\b")
HEAD = ("study", "lines", "machine", "torch", "measured", "commits", "lines of changed trees")
Cell = Mapping[str, Any]  # of expected.toml and quoted.toml
Line = tuple[str, dict[str, str]]  # the heading above its table, and heading of a column -> cell


# tables


def report_of(name: str, figure: Path | None = None) -> str:
    """Return the report of a study from its raw lines, and draw its figure into a file, by default none that stays."""
    text = io.StringIO()
    with tempfile.TemporaryDirectory() as scratch, redirect_stdout(text):
        study.call("report", name, ["--figure", str(figure or Path(scratch) / "figure.svg")])
    if plots := sys.modules.get("matplotlib.pyplot"):
        plots.close("all")
        plots.rcdefaults()
    return text.getvalue()


def tables_of(report: str) -> list[str]:
    """Return every Markdown table, each line with its end."""
    return re.findall(r"(?:^\|.*\n)+", f"{report}\n", re.MULTILINE)


def pages_of(study: str) -> dict[Path, str]:
    return {page: page.read_text(encoding="utf-8") for page in sorted((HERE / study).glob("*.md"))}


def placed(page: str, tables: Sequence[str]) -> str:
    """Return the page with table N of the report behind its marker."""
    known = {str(n): table for n, table in enumerate(tables, 1)}
    return PLACE.sub(lambda found: found[1] + known.get(found[2], found[3]), page)


def misplaced(study: str, report: str) -> list[str]:
    """Return a line for each table of a report that its pages lack, hold otherwise, or name without a report."""
    shown = [(int(found[2]), found[3]) for page in pages_of(study).values() for found in PLACE.finditer(page)]
    tables = dict(enumerate(tables_of(report), 1))
    lines = [f"{study}: no page has <!-- table {n} -->" for n in tables.keys() - {n for n, _ in shown}]
    return lines + [f"{study}: table {n} of a page is another one" for n, table in shown if tables.get(n) != table]


# numbers


def lines_of(report: str) -> list[Line]:
    """Return every line of every Markdown table."""
    found: list[Line] = []
    above, columns = "", None
    for line in report.splitlines():
        if not line.startswith("|"):
            above, columns = (line if line.startswith("#") else above), None
            continue
        cells = [cell.strip().replace("**", "") for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        if columns is None:
            columns = cells
        elif not all(re.fullmatch(":?-+:?", cell) for cell in cells):
            found.append((above, dict(zip(columns, cells, strict=False))))
    return found


def value_of(cell: Cell, lines: Sequence[Line]) -> float:
    """Return the number that a cell names. Raise ValueError where no line or several are meant."""
    meant = [
        cells
        for above, cells in lines
        if above.startswith(cell.get("under", ""))
        and cell["column"] in cells
        and all(name in cells and text in ("*", cells[name]) for name, text in cell["row"].items())
    ]
    if len(meant) != 1:
        raise ValueError(f"{len(meant)} lines are {cell['row']} and have a column {cell['column']}")
    numbers, part = NUMBER.findall(meant[0][cell["column"]]), cell.get("part", 0)
    if len(numbers) <= part:
        raise ValueError(f"no number {part} in {cell['column']} of {cell['row']}: {meant[0][cell['column']]}")
    found = float(numbers[part])
    if "over" in cell:
        found /= value_of(cell["over"], lines)
    return abs(found) if cell.get("without_sign") else found


def expected(study: str) -> list[Cell]:
    """Return the headline numbers of an experiment."""
    return tomllib.loads((HERE / EXPECTED).read_text(encoding="utf-8")).get(study, [])


def verdicts(study: str, report: str) -> list[tuple[bool, str]]:
    """Return for every headline number whether it lies inside, and a line that says so."""
    lines, found = lines_of(report), []
    for cell in expected(study):
        low, high = cell["range"]
        try:
            value = value_of(cell, lines)
        except ValueError as error:
            found.append((False, f"missing: {cell['what']}: {error}"))
            continue
        inside = low <= value <= high
        found.append((inside, f"{'inside' if inside else 'OUTSIDE'} {low:g} to {high:g}: {value:g} ({cell['what']})"))
    return found


class Quote(NamedTuple):
    """`shown`: the number as its text has it. `where`: file and words. `cell`: as quoted.toml has it."""

    shown: str
    where: str
    cell: Cell


def entries() -> list[dict[str, Any]]:
    """Return texts and their cells."""
    return tomllib.loads((HERE / QUOTED).read_text(encoding="utf-8"))["quoted"]


def quoted() -> list[Quote]:
    """Return every quoted number. Raise ValueError where a text no longer stands, or has not one cell a number."""
    found: list[Quote] = []
    for entry in entries():
        name, text, cells = entry["in"], entry["text"], entry["of"]
        shown = BRACES.findall(text)
        words = BRACES.sub(r"\1", text)
        if words not in (HERE.parent / name).read_text(encoding="utf-8"):
            raise ValueError(f"{name} does not say: {words}")
        if len(shown) != len(cells):
            raise ValueError(f"{len(shown)} numbers and {len(cells)} cells: {name}: {text}")
        found += [Quote(number, f"{name}: {words}", cell) for number, cell in zip(shown, cells, strict=True)]
    return found


def rounded(found: float, shown: str) -> str:
    """Return a number with the digits and the sign of the text that shows it."""
    return f"{found:{'+' * shown.startswith('+')}.{len(shown.partition('.')[2])}f}"


def difference(quote: Quote, lines: Sequence[Line]) -> str | None:
    """Return the error of a quoted number, or None."""
    try:
        found = value_of(quote.cell, lines)
    except ValueError as error:
        return str(error)
    return None if float(rounded(found, quote.shown)) == float(quote.shown) else f"the lines have {found:g}"


# where and when


def origins(row: object) -> Iterator[Mapping[str, Any]]:
    """Return every part of a line that says on which commit it was made."""
    if isinstance(row, dict) and isinstance(row.get("commit", 0), str | None):
        yield row
    elif isinstance(row, dict | list):
        for value in row.values() if isinstance(row, dict) else row:
            yield from origins(value)


def measured(folder: Path) -> list[str]:
    """Return the cells of a study: machine, versions and commits of its lines; dates of its page."""
    files = sorted(folder.glob("*.jsonl.1.xz"))
    rows = [row for file in files for row in records.read(folder / file.name.removesuffix(".1.xz"))]
    found = [next(origins(row), {}) for row in rows]
    machines = sorted({str(each["hardware"]) for each in found if each.get("hardware")})
    versions = sorted({str(each["versions"]["torch"]) for each in found if each.get("versions")})
    commits = [str(each["commit"]) for each in found if each.get("commit")]
    dates = sorted(set(DATE.findall((folder / "README.md").read_text(encoding="utf-8"))))
    unknown = "see page"
    return [
        f"[{folder.name}]({folder.name}/README.md)",
        str(len(rows)) if rows else "-",
        "; ".join(machines) or unknown,
        ", ".join(versions) or unknown,
        " to ".join(dict.fromkeys((dates[0], dates[-1]))) if dates else "-",
        str(len({commit.rstrip("+") for commit in commits})) if commits else unknown,
        str(sum(commit.endswith("+") for commit in commits)) if commits else "-",
    ]


def where_and_when() -> str:
    """Return the table of README.md, a line a study."""
    return table(HEAD, [measured(file.parent) for file in sorted(HERE.glob("*/README.md"))], rule=" --- |") + "\n"


# renew


def ended(experiments: Path) -> list[str]:
    """Return the folders of a copy in which all that one list of studies runs there has ended."""
    found: set[str] = set()
    for listed in study.lists().values():
        found |= {each.folder for each in listed} - {e.folder for e in listed if not e.ended(experiments).exists()}
    return sorted(found)


def requote(reports: Mapping[str, str]) -> list[str]:
    """Write numbers of these studies as their reports have them. Return a line for each that has no number."""
    lines = {study: lines_of(report) for study, report in reports.items()}
    lost: list[str] = []
    listed = (HERE / QUOTED).read_text(encoding="utf-8")
    for entry in entries():
        cells = iter(entry["of"])

        def number(found: re.Match[str], name: str = entry["in"], cells: Iterator[Cell] = cells) -> str:
            cell, shown = next(cells), found[1]
            try:
                known = lines.get(cell["study"])
                return f"{{{shown if known is None else rounded(value_of(cell, known), shown)}}}"
            except ValueError as error:
                lost.append(f"{name}: {shown}: {error}")
                return found[0]

        text = BRACES.sub(number, entry["text"])
        page = HERE.parent / entry["in"]
        before, behind = (BRACES.sub(r"\1", words) for words in (entry["text"], text))
        page.write_text(page.read_text(encoding="utf-8").replace(before, behind), encoding="utf-8")
        listed = listed.replace(entry["text"], text)
    (HERE / QUOTED).write_text(listed, encoding="utf-8")
    return lost


def renew(*names: str) -> None:
    """Take lines measured again from COPY/experiments, and the files beside them, and write the pages anew.

    names: COPY, and studies (all that have ended there). Print a line for each table and number without a place.
    """
    copy, *studies = names
    experiments, where, reports, lost = Path(copy) / "experiments", where_and_when(), {}, []
    for name in (studies := studies or ended(experiments)):
        for file in sorted((experiments / name).glob("*.*")):
            if file.suffix in (".jsonl", ".json", ".csv") and not file.name.startswith(("smoke_", "quick_")):
                here = shutil.copy(file, HERE / name / file.name)
                if file.suffix == ".jsonl":
                    records.pack(here)
        reports[name] = report_of(name, HERE / name / "figure.svg")
        for page, text in pages_of(name).items():
            page.write_text(placed(text, tables_of(reports[name])), encoding="utf-8")
        lost += misplaced(name, reports[name])
    page = HERE / "README.md"
    text = page.read_text(encoding="utf-8")
    page.write_text(text.replace(where, where_and_when()), encoding="utf-8")
    lost += requote(reports) + ["README.md has another table of machines"] * (where not in text)
    print(*lost, f"{len(studies)} studies, {len(lost)} lines to be placed by hand", sep="\n")


# commands


def check_tables(*names: str) -> bool:
    """Compare tables behind <!-- table N --> with the reports of these studies (all)."""
    marked = [page.parent.name for page in sorted(HERE.glob("*/*.md")) if PLACE.search(page.read_text("utf-8"))]
    names = names or tuple(dict.fromkeys(marked))
    lines = [line for name in names for line in misplaced(name, report_of(name))]
    print("\n".join(lines) or f"tables of {len(names)} studies are their reports'")
    return bool(lines)


def check_quoted(*, count: int = 50, seed: int = -1) -> bool:
    """Compare numbers of quoted.toml, drawn at random, with their cells."""
    every, wrong = quoted(), 0
    seed = random.randrange(10**6) if seed < 0 else seed
    chosen = random.Random(seed).sample(every, min(count, len(every)))
    print(f"{len(chosen)} of {len(every)} quoted numbers, --seed {seed}")
    for name in sorted({quote.cell["study"] for quote in chosen}):
        lines = lines_of(report_of(name))
        for quote in (quote for quote in chosen if quote.cell["study"] == name):
            problem = difference(quote, lines)
            wrong += problem is not None
            print(f"{'WRONG' if problem else 'right'}  {quote.shown:>6}  {name}: {problem or quote.where[:90]}")
    print(f"{len(chosen) - wrong} of {len(chosen)} match")
    return bool(wrong)


def check_expected(*names: str, list: bool = False) -> bool:
    """Compare a report, on stdin, with the ranges of expected.toml. list: print them."""
    (name,) = names
    if list:
        lines = [f"{cell['range'][0]:g} to {cell['range'][1]:g}: {cell['what']}" for cell in expected(name)]
        print("\n".join(["", "expected:", *lines]) if lines else "")
        return False
    found = verdicts(name, sys.stdin.read())
    print("\n".join(line for _, line in found) or f"no ranges are expected of {name}")
    return not all(inside for inside, _ in found)


def show_measured() -> None:
    """Print the table of README.md."""
    print(where_and_when(), end="")


COMMANDS = {"tables": check_tables, "quoted": check_quoted, "expected": check_expected}
COMMANDS |= {"measured": show_measured, "renew": renew}


def main() -> int:
    if len(sys.argv) < 2 or sys.argv[1] not in COMMANDS:
        raise SystemExit(__doc__)
    command = COMMANDS[sys.argv[1]]
    given = study.options(command, sys.argv[2:])
    return bool(command(*given.pop("names", ()), **given))


if __name__ == "__main__":
    sys.exit(main())
