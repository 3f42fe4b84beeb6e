"""What is named beside a comparison: data that changed between runs, and folders that a pattern names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import gnnpar
from gnnpar.report.fairness import differences, exchanged
from planted_runs import Plant


@pytest.mark.parametrize(("what", "key"), [("graph", "graph_seed"), ("split", "split_seed"), ("split", "split_index")])
def test_configuration_on_two_graphs_or_splits_is_named(template: dict[str, Any], what: str, key: str) -> None:
    other = {**template, "seed": 9, "hashes": {**template["hashes"], what: "0" * 64}}
    assert exchanged([template, template]) == []
    assert f"are of several {what}s; the data has changed" in exchanged([template, other])[0]
    dataset = {**template["settings"]["dataset"], key: None}
    drawn = [{**each, "settings": {**each["settings"], "dataset": dataset}} for each in (template, other)]
    assert exchanged(drawn) == [], "drawn by the seed of the run"


def test_captured_epochs_are_not_compared_with_others(template: dict[str, Any]) -> None:
    captured = {**template["settings"], "launch": {"cuda_graph": True}}
    assert "cuda_graph" in differences(template, {**template, "settings": captured})


def test_folder_named_like_a_pattern_is_that_folder(plant: Plant, tmp_path: Path) -> None:
    plant("[1]", seed=5)
    plant("1", seed=6)
    assert list(gnnpar.compare([tmp_path / "[1]"]).frame["seed"]) == [5]
    assert sorted(gnnpar.compare([tmp_path]).frame["seed"]) == [5, 6]


def test_runs_with_other_early_stopping_differ(template: dict[str, Any]) -> None:
    stopped = {**template, "settings": {**template["settings"], "early_stopping": {"patience": 1, "min_delta": 0.0}}}
    assert "early stopping" in differences(template, stopped)
