"""Pages take the figures of lines that were measured again.

    python experiments/renew.py outputs/compare              # studies that have ended there
    python experiments/renew.py outputs/compare bandwidth    # this one, ended or not

Lines of the copy take the place of those that are committed, packed. Wherever the pages of a study show a line of its
report, they show that of the new report; figures are drawn again; numbers that quoted.toml names are written anew, in
the texts and in quoted.toml; so is the table of measured.py. Sentences are not read: what they conclude, where and when
it was measured, and what is printed as not found is left to the author.
"""

import argparse
import difflib
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import all_studies
import audit
import measured
import records
from expected import lines_of

BESIDE = ("rates.json", "*.csv", "*.chosen.json")  # what a study keeps beside its lines
REHEARSED = ("smoke", "quick")
Lines = list[str]


def ended(experiments: Path) -> list[str]:
    """Folders of a copy in which all that one list of studies runs there has ended."""
    found: set[str] = set()
    for studies in all_studies.LISTS.values():
        folders = {study.where for study in studies}
        found |= folders - {study.where for study in studies if not study.ended(experiments).exists()}
    return sorted(found)


def take(study: str, copy: Path) -> None:
    """Its lines, and what lies beside them; no links, which may lead to other files of the user's."""
    if links := [file for file in copy.rglob("*") if file.is_symlink()]:
        raise SystemExit(f"{links[0]} is a symbolic link: remove it")
    for file in sorted(copy.glob("*.jsonl")):
        if not file.name.startswith(REHEARSED):
            here = HERE / study / file.name
            shutil.copy(file, here)
            records.pack(here)
    for file in (file for pattern in BESIDE for file in copy.glob(pattern)):
        shutil.copy(file, HERE / study / file.name)


def edits(old: Sequence[str], new: Sequence[str]) -> Iterator[tuple[Lines, Lines]]:
    """Runs of lines that others have replaced, in their order; a line each where there are as many."""
    for kind, i, j, k, m in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if kind == "equal":
            continue
        if j - i == m - k:
            yield from (([before], [after]) for before, after in zip(old[i:j], new[k:m], strict=True))
        else:
            yield list(old[i:j]), list(new[k:m])


def find(run: Sequence[str], page: Sequence[str], start: int) -> int | None:
    """Where it stands as it is: behind `start`, else anywhere."""
    places = [i for i in range(len(page) - len(run) + 1) if list(page[i : i + len(run)]) == list(run)]
    return next((i for i in places if i >= start), places[0] if places else None) if run else None


def rewrite(pages: Sequence[Path], old: Sequence[str], new: Sequence[str]) -> Lines:
    """Shows `new` where the pages show `old`. What is not found in any of them."""
    texts = {page: page.read_text(encoding="utf-8").split("\n") for page in pages}
    after = dict.fromkeys(pages, 0)
    lost: Lines = []
    for before, behind in edits(old, new):
        places = ((page, find(before, texts[page], after[page])) for page in pages)
        page, i = next(((page, i) for page, i in places if i is not None), (None, 0))
        if page is None:
            lost += [f"- {line}" for line in before] + [f"+ {line}" for line in behind]
            continue
        texts[page][i : i + len(before)] = behind
        after[page] = i + len(behind)
    for page, text in texts.items():
        page.write_text("\n".join(text), encoding="utf-8")
    return lost


def requote(studies: Sequence[str]) -> Lines:
    """Numbers of these studies as their lines have them, in quoted.toml and in the texts. What has no number."""
    reports = {study: lines_of(audit.report_of(study)) for study in studies}
    lost: Lines = []
    listed = audit.FILE.read_text(encoding="utf-8")
    for entry in audit.entries(audit.FILE):
        text, end = "", 0
        for match, cell in zip(audit.BRACES.finditer(entry["text"]), entry["of"], strict=True):
            number = match[1]
            if cell["study"] in reports:
                try:
                    number = audit.rounded(audit.value(cell, reports[cell["study"]]), number)
                except ValueError as error:
                    lost.append(f"{entry['in']}: {number}: {error}")
            text += f"{entry['text'][end : match.start()]}{{{number}}}"
            end = match.end()
        text += entry["text"][end:]
        page = HERE.parent / entry["in"]
        before, behind = (audit.BRACES.sub(r"\1", words) for words in (entry["text"], text))
        page.write_text(page.read_text(encoding="utf-8").replace(before, behind), encoding="utf-8")
        listed = listed.replace(entry["text"], text)
    audit.FILE.write_text(listed, encoding="utf-8")
    return lost


def draw(folder: Path, program: Sequence[str]) -> None:
    """The figure of a folder, where there is one."""
    figure = folder / "figure.svg"
    if figure.exists():
        subprocess.run([*program, "--figure", str(figure)], stdout=subprocess.DEVNULL, check=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("copy", type=Path, help="the folder that has the new lines in COPY/experiments")
    parser.add_argument("studies", nargs="*", metavar="STUDY", help="default: all that have ended there")
    options = parser.parse_args()
    experiments = options.copy / "experiments"
    studies = options.studies or ended(experiments)
    where = measured.table()
    lost: Lines = []
    for study in studies:
        old = audit.report_of(study).splitlines()
        take(study, experiments / study)
        new = audit.report_of(study).splitlines()
        pages = sorted((HERE / study).glob("*.md"))
        lost += [f"{study}: {line}" for line in rewrite(pages, old, new)]
        draw(HERE / study, all_studies.command(HERE / study, "report"))
    draw(HERE, [sys.executable, str(HERE / "overview.py")])
    lost += requote(studies)
    lost += rewrite([HERE / "README.md"], where, measured.table())
    print(*lost, f"{len(studies)} studies, {len(lost)} lines to be placed by hand", sep="\n")


if __name__ == "__main__":
    main()
