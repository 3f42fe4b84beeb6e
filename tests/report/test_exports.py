"""Exports hold the figures of the comparison, and files are what they claim to be."""

import csv
import io
import json
import re
import shutil
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

from gnnpar import report
from gnnpar.cli import compare as command
from gnnpar.report.comparison import table_rows
from gnnpar.report.exports import Table
from gnnpar.report.latex import TEXT_WIDTH, _tex, as_latex
from gnnpar.settings import ConfigError
from gnnpar.track.jsonl import read_rows
from planted_runs import DROP, OURS, Plant, accurate, real_run


@pytest.fixture
def study(plant: Plant, tmp_path: Path) -> Path:
    """Two strategies and the control over five seeds, ours 2 to 4 times faster and 10 points better."""
    for seed in range(5):
        curve = [0.1, 0.3 + seed / 10, 0.7]
        plant(seed=seed, epoch=4.0, curve=curve, **accurate(70 + seed))
        plant(seed=seed, epoch=1.0 + seed / 2, curve=curve, **OURS, **accurate(80 + seed + 0.1 * (-1) ** seed))
        plant(seed=seed, epoch=1.0, **OURS | DROP, **accurate(30 + seed))
    return tmp_path


def output(capsys: pytest.CaptureFixture, *arguments: str) -> str:
    assert command.run(list(arguments)) == 0
    return capsys.readouterr().out


def table(text: str) -> str:
    """What follows the answer."""
    answer, _, rest = text.partition("\n\n")
    assert answer.startswith("sbm / gcn: use graph_parallel")
    return rest


def test_several_seeds_are_grouped_unless_told_otherwise(study: Path, capsys: pytest.CaptureFixture) -> None:
    grouped = output(capsys, str(study))
    (line,) = [line for line in grouped.splitlines() if "graph_parallel" in line and " exact " in line]
    assert " 82.0" in line and "not inferior" in line
    assert "not inferior" not in table(output(capsys, str(study), "--no-group"))


def test_a_narrow_terminal_goes_without_what_matters_least(
    study: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rich.console import Console

    wide = " ".join(table(output(capsys, str(study))).splitlines()[:2]).split()
    monkeypatch.setattr("gnnpar.cli.compare._console", lambda: Console(width=100, highlight=False))
    narrow = output(capsys, str(study))
    assert {"verdict", "control", "epoch"} <= set(" ".join(table(narrow).splitlines()[:2]).split()) < set(wide)
    assert "too narrow for exactness" in narrow


def test_json_holds_runs_groups_and_what_was_asked(study: Path, capsys: pytest.CaptureFixture) -> None:
    found = json.loads(output(capsys, str(study), "--json", "--margin", "0.5"))
    assert (len(found["rows"]), len(found["groups"]), found["margin"], found["baseline"]) == (15, 3, 0.5, "single")
    ours = found["groups"][1]
    assert ours["speedup"] == pytest.approx((4 * 4 / 1.5 * 2 * 4 / 2.5 * 4 / 3) ** (1 / 5))
    assert ours["speedup_low"] < ours["speedup"] < ours["speedup_high"]
    assert (ours["accuracy"], ours["verdict"], ours["control_verdict"]) == (
        pytest.approx(82 + 0.1 / 5),
        "not inferior",
        "inferior",
    )
    assert ours["seconds_to_target"] == 3.0


def test_the_peak_of_a_run_is_that_of_the_ranks_that_have_one(plant: Plant, tmp_path: Path) -> None:
    results = [(tmp_path, plant(memory_bytes__peak=peak)) for peak in ([None, 7], [None], [], None)]
    assert [row["memory_peak_bytes"] for row in table_rows(results, baseline="single")] == [7, None, None, None]


def test_csv_of_groups_holds_the_values_of_json(study: Path, capsys: pytest.CaptureFixture) -> None:
    groups = json.loads(output(capsys, str(study), "--json"))["groups"]
    lines = list(csv.DictReader(io.StringIO(output(capsys, str(study), "--csv", "--group"))))
    assert [{k: "" if v is None else str(v) for k, v in group.items()} for group in groups] == lines
    assert len(list(csv.DictReader(io.StringIO(output(capsys, str(study), "--csv"))))) == 15


def test_markdown_and_latex_set_bold_what_a_paired_test_puts_first(study: Path, capsys: pytest.CaptureFixture) -> None:
    markdown = output(capsys, str(study), "--markdown").splitlines()
    widths = {line.count("|") for line in markdown if line.startswith("|")}
    assert len(widths) == 1
    assert [line.count("**") for line in markdown if line.startswith("|")] == [0, 0, 0, 4, 0]
    latex = output(capsys, str(study), "--latex")
    assert all(rule in latex for rule in (r"\toprule", r"\midrule", r"\bottomrule", r"graph\_parallel"))
    assert re.search(r"\\bfseries 82\.0 \+- [\d.]+ ", latex)


def test_latex_is_narrow_and_grouped_by_model(study: Path, plant: Plant, capsys: pytest.CaptureFixture) -> None:
    latex = output(capsys, str(study), "--latex")
    assert "% everywhere: model gcn\n% everywhere: dataset sbm\n" in latex and "sbm &" not in latex
    assert "% left out, the page is too narrow: " in latex and "; --columns chooses\n" in latex
    for seed in range(5):
        plant(seed=seed, model="gat")
    latex = output(capsys, str(study), "--latex", "--columns", "strategy; model; epoch; speed-up; test at best val, %")
    heads = [line for line in latex.splitlines() if line.startswith(r"\multicolumn{5}{@{}l}{\textit{")]
    assert [re.findall(r"textit\{(\w+)", line)[0] for line in heads] == ["gcn", "gat"]
    first = r"{strategy} & {epoch} & {x single} & {95 \%} & {test at best} \\"
    assert first + "\n" + r" & {(s)} &  &  & {val, \%} \\" in latex and latex.count(r"\addlinespace") == 1
    body = latex[latex.index("\\midrule") : latex.index("\\bottomrule")]
    assert {line.count(" & ") for line in body.splitlines() if " & " in line} == {4}
    markdown = output(capsys, str(study), "--markdown", "--columns", "strategy;epoch").splitlines()
    assert markdown[0] == "| strategy | epoch |"
    with pytest.raises(ConfigError, match="--columns epochs is no column here, did you mean epoch"):
        command.run([str(study), "--latex", "--columns", "epochs"])
    with pytest.raises(ConfigError, match="CSV and JSON have all"):
        command.run([str(study), "--csv", "--columns", "epoch"])


def test_latex_aligns_numbers_in_one_unit_and_keeps_what_is_none_as_text() -> None:
    lines = [["a", "998.6 ms", "-", "1 of 5"], ["b_c", "1.25 s", "> 3.1", "5"], ["d", "12.50 s", "-2.42 ± 0.31", "5"]]
    latex = as_latex(Table(["strategy", "epoch", "difference", "runs"], [True, False, False, False], lines, {(1, 1)}))
    assert "S[table-format=2.4,text-series-to-math,reset-text-series=false]" in latex
    assert "S[table-format=+1.2(2),separate-uncertainty]" in latex
    assert r"a & 0.9986 & {--} & {1 of 5} \\" in latex and r"b\_c & \bfseries 1.25 & {$>$ 3.1} & 5 \\" in latex
    assert r" & {(s)} &  &  \\" in latex


@pytest.mark.slow
def test_latex_compiles_and_is_no_wider_than_the_text(
    study: Path, plant: Plant, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    if not shutil.which("pdflatex"):
        pytest.skip("no pdflatex on this machine; apt-get install texlive-latex-recommended texlive-science")
    for i, name in enumerate(("adaqp", "sar", "gnnpipe", "a_strategy_of_somebody_with_a_long_name")):
        for seed in range(5):
            plant(seed=seed, model="gat", epoch=0.1 + i, **OURS | {"strategy": name}, **accurate(70 + seed / 7))
    tables = {
        "grouped": output(capsys, str(study), "--latex"),
        "runs": output(capsys, str(study), "--latex", "--no-group"),
        "chosen": output(capsys, str(study), "--latex", "--columns", "strategy; epoch; speed-up; sent/epoch"),
    }
    body = ""
    for name, text in tables.items():
        (tmp_path / f"{name}.tex").write_text(text)
        body += (
            rf"\savebox{{\one}}{{\input{{{name}}}}}\typeout{{width of {name} \the\wd\one}}\usebox{{\one}}\par" + "\n"
        )
    head = r"\documentclass{article}\usepackage{booktabs,siunitx}\newsavebox{\one}\begin{document}"
    (tmp_path / "paper.tex").write_text(f"{head}\n{body}\\end{{document}}\n")
    run = ["pdflatex", "-interaction=nonstopmode", "-halt-on-error", "paper.tex"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:]
    widths = {name: float(points) for name, points in re.findall(r"width of (\w+) ([\d.]+)pt", done.stdout)}
    assert set(widths) == set(tables)
    assert all(200 < width <= TEXT_WIDTH for width in widths.values()), widths


@pytest.mark.slow
def test_figures_are_files_of_three_kinds_with_the_data_behind_them(study: Path, capsys: pytest.CaptureFixture) -> None:
    (study / "figures").mkdir()
    outside = study / "outside"
    outside.touch()
    for form in ("svg", "csv"):
        (study / "figures" / f"breakdown.{form}").symlink_to(outside)
    groups = json.loads(output(capsys, str(study), "--json", "--figures", str(study / "figures")))["groups"]
    assert outside.read_bytes() == b""  # links are replaced
    names = {"speedup", "breakdown", "accuracy_time", "accuracy_bytes"}  # a run of one rank sends nothing: no bytes
    files = {file.name for file in (study / "figures").iterdir()}
    assert files == {f"{name}.{form}" for name in names for form in ("svg", "pdf", "png", "csv")}
    for name in names:
        svg, pdf, png = ((study / "figures" / f"{name}.{form}").read_bytes() for form in ("svg", "pdf", "png"))
        root = ElementTree.fromstring(svg)
        assert root.tag.endswith("svg") and float(root.get("width", "").removesuffix("pt")) == 7 * 72  # the whole width
        assert pdf.startswith(b"%PDF") and png.startswith(b"\x89PNG")
    rows = {name: list(csv.DictReader((study / "figures" / f"{name}.csv").open())) for name in names}
    means = [row for row in rows["speedup"] if not row["block"]]
    assert [float(row["ratio"]) for row in means] == [group["speedup"] for group in groups]
    assert [float(row["low"]) for row in means] == [group["speedup_low"] for group in groups]
    assert len([row for row in rows["speedup"] if row["block"]]) == 15
    curve = [row for row in rows["accuracy_time"] if row["strategy"] == "single" and not row["run"]]
    assert [float(row["percent"]) for row in curve] == pytest.approx([10, 50, 70])
    assert [float(row["seconds"]) for row in curve] == [1, 2, 3] and {row["target_percent"] for row in curve} != {""}
    svg = (study / "figures" / "accuracy_time.svg").read_text()
    assert ">graph_parallel</text>" in svg and "legend" not in svg  # names stand beside their curves


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", [r"$\frac{$", "a$b$", "[/red]"])
def test_names_are_no_formulas_and_no_markup(
    plant: Plant, study: Path, capsys: pytest.CaptureFixture, name: str
) -> None:
    """Of figures and of the table, whose baseline it is."""
    for seed in range(3):
        plant(seed=seed, epoch=1.0, **OURS | {"strategy": name}, **accurate(70))
    assert command.run([str(study), "--figures", str(study / "figures"), "--baseline", name]) == 0
    assert name in capsys.readouterr().out


@pytest.mark.parametrize("wrong", [("--margin", "0"), ("--target", "72")])
def test_options_out_of_range_are_refused(study: Path, wrong: tuple[str, str]) -> None:
    with pytest.raises(ConfigError, match=rf"{wrong[0]} {wrong[1]} must"):
        command.run([str(study), *wrong])


def test_load_gives_a_row_a_run_and_history_a_row_an_epoch(tmp_path: Path) -> None:
    result = real_run(tmp_path / "sweep" / "0", "strategy=single", "epochs=4")
    frame = report.load(tmp_path / "**")
    assert list(frame.columns[:4]) == ["strategy", "variant", "settings", "exactness"]
    (row,) = frame.to_dict("records")
    assert (row["strategy"], row["epoch_seconds"]) == ("single", result["epoch_seconds"]["median"])
    assert row["settings.optim.lr"] == str(result["settings"]["optim"]["lr"])
    history = report.history(row["folder"])
    assert list(history["loss/train"]) == [r["loss/train"] for r in read_rows(tmp_path / "sweep" / "0")]
    with pytest.raises(ConfigError, match="names no folder"):
        report.load(tmp_path / "nowhere*")
    with pytest.raises(ConfigError, match="no epoch in"):
        report.history(tmp_path)


def test_names_in_exports_are_escaped(tmp_path: Path, plant: Plant, capsys: pytest.CaptureFixture) -> None:
    name = "a\x1b[2J\n\\input{x} <img src=x>| \\<b>"
    for seed in range(2):
        plant(seed=seed, epoch=1.0, dataset=name)
    (line, *_) = csv.DictReader(io.StringIO(output(capsys, str(tmp_path), "--csv")))
    assert line["dataset"].startswith("a\\x1b[2J\\n")
    assert not re.search(r"(?<!\\)(\\\\)*<(img|b)", output(capsys, str(tmp_path), "--markdown"))
    assert not re.search(r"^(?!%).*\\input", output(capsys, str(tmp_path), "--latex"), re.MULTILINE)


def test_brackets_in_latex_are_escaped() -> None:
    assert _tex("[1cm]") == "{[}1cm]"
    assert _tex("a[1]_") == r"a[1]\_"
