"""`gnnpar cite`: what to cite follows from docstrings; no list of strategies."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from composing import configured, names
from conftest import ROOT
from gnnpar import __version__
from gnnpar.cli import cite
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.settings import ConfigError


@pytest.fixture
def cited(capsys: pytest.CaptureFixture) -> Callable[..., str]:
    def run(*overrides: str) -> str:
        assert cite.run(list(overrides)) == 0
        return capsys.readouterr().out

    return run


def test_gnnpar_alone(cited: Callable[..., str]) -> None:
    text = cited()
    assert text.count("@") == 1
    assert text.startswith("@software{gnnpar,")


PAPERS = {
    **{"sar": "mostafa2022sar", "adaqp": "wan2023adaqp", "gnnpipe": "chen2023gnnpipe", "tag": "zhang2023tag"},
    **{"bns": "wan2022bns", "pipegcn": "wan2022pipegcn", "feature": "ai2024neutrontp", "cofree": "cao2023cofree"},
    **{"digest": "chai2022digest", "cagnet": "tripathy2020cagnet", "sancus": "peng2022sancus"},
    "minibatch": "hamilton2017graphsage",
    "minibatch strategy.sampler=cluster": "chiang2019clustergcn",
    "minibatch strategy.sampler=uniform": "wang2026implicit",
    "minibatch strategy.sampler=saint": "zeng2020graphsaint",
}


@pytest.mark.quick(3)
@pytest.mark.parametrize(("strategy", "key"), PAPERS.items())
def test_a_strategy_cites_its_paper(cited: Callable[..., str], strategy: str, key: str) -> None:
    found = re.findall(r"^@\w+\{([^,]+),", cited(*f"strategy={strategy}".split()), re.MULTILINE)
    assert found == ["gnnpar", key]


def test_every_paper_that_a_strategy_names_is_known_and_every_entry_is_whole() -> None:
    entries = cite.entries()
    known = {cite.number_of(entry) for entry in entries.values()}
    for strategy in names("strategy"):
        assert set(cite.papers_of(configured("strategy", strategy))) <= known, strategy
    for key, entry in entries.items():
        assert all(cite.field(entry, name) for name in ("title", "author", "year")), key
        assert entry.count("{") == entry.count("}"), key


def test_a_strategy_of_ones_own_cites_what_its_docstring_names() -> None:
    class Mine(SAR):
        """After arXiv:1234.56789 (doi:10.1/a-b.2)."""

    assert cite.papers_of(Mine()) == ["1234.56789", "10.1/a-b.2", "2111.06483"]
    assert "url = {https://doi.org/10.1/a-b.2}" in cite.unknown("10.1/a-b.2")
    assert "eprint = {1234.56789}" in cite.unknown("1234.56789")


def test_anything_else_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cite does not know model=gcn; write gnnpar cite strategy=NAME"):
        cite.run(["model=gcn"])
    with pytest.raises(ConfigError, match=r"strategy=sarr does not exist, did you mean sar"):
        cite.run(["strategy=sarr"])


def test_the_citation_file_says_the_same() -> None:
    said = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    entry = cite.entries()["gnnpar"]
    assert said["version"] == cite.field(entry, "version") == __version__
    assert said["title"] == (cite.field(entry, "title") or "").replace("{GNN}", "GNN")
    assert {"cff-version", "message", "authors", "type"} <= set(said)


def test_a_plan_cites_its_strategy(cited: Callable[..., str], tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text('{"strategy": {"name": "sar", "_target_": "gnnpar.parallel.sequential.strategy.SAR"}}')
    assert cited(f"plan={plan}") == cited("strategy=sar")
    with pytest.raises(ConfigError, match="the plan sets the strategy"):
        cite.run([f"plan={plan}", "strategy=single"])
