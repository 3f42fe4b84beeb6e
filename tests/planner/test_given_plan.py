"""plan=FILE edited by hand: what is edited changes what runs, or is refused in one line."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from composing import configured
from gnnpar.comm import ThreadWorld
from gnnpar.config.compose import compose
from gnnpar.parallel.pipeline.hybrid import Hybrid
from gnnpar.parallel.sequential.strategy import SAR
from gnnpar.parallel.strategy import Strategy
from gnnpar.placement import Plan
from gnnpar.planner.strategy import TAG
from gnnpar.settings import Settings, instantiate
from gnnpar.training.plans import given_plan
from gnnpar.verify.conformance import make_job, merge_ranks, small_graph

SMALL = ("model=gcn", "model.num_layers=2", "world_size=2", "comm=threads")
BF16 = {"_target_": "gnnpar.codecs.codec.BFloat16"}
Change = Callable[[dict[str, Any]], Any]


def written(folder: Path, strategy: str, *overrides: str, world: int = 2) -> Path:
    """plan.json of a strategy for the small graph."""
    settings = compose([f"strategy={strategy}", *SMALL, *overrides])
    plan = make_job(settings.strategy, settings.model, small_graph(), world=world).plan
    file = plan.save(folder)
    data = json.loads(file.read_text())
    data["strategy"] = {"name": strategy, **settings.resolved["strategy"]}
    file.write_text(json.dumps(data))
    return file


def edited(file: Path, change: Change) -> Settings:
    """The settings of a run with this plan, after a change of it."""
    data = json.loads(file.read_text())
    change(data)
    file.write_text(json.dumps(data))
    chosen = {key: value for key, value in data["strategy"].items() if key != "name"}
    if chosen["_target_"].endswith("Single"):
        del chosen["halo"], chosen["reduce"]
    return replace(compose(SMALL), plan=file, strategy=instantiate(chosen, "strategy"))


def refusal(settings: Settings) -> str:
    assert settings.plan is not None
    with pytest.raises(ValueError, match=r".*") as caught:
        given_plan(settings.plan, settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_plan_is_written_without_layers(tmp_path: Path) -> None:
    assert "layers" not in json.loads(written(tmp_path, "graph_parallel").read_text())


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda data: data["setup"].update(colour=3), "nothing reads setup.colour"),
        (lambda data: data.update(layers_of=[[0, 1], [1, 2]]), "has one stage, but layers_of has 2"),
        (
            lambda data: (
                data["strategy"].update({"_target_": "gnnpar.parallel.single.strategy.Single"})
                or [data["strategy"].pop(key) for key in ("codec", "overlap")]
            ),
            "runs on 1 rank, but mesh has 2",
        ),
        (
            lambda data: data.update(quality=["quantized"]) or data["strategy"].update(codec=BF16),
            "strategy=graph_parallel is rounded, which quality=['quantized'] does not allow",
        ),
    ],
)
def test_what_is_without_effect_or_contradicts_is_refused(change: Change, line: str, tmp_path: Path) -> None:
    assert line in refusal(edited(written(tmp_path, "graph_parallel"), change))


def test_a_strategy_without_stages_or_chunks_takes_no_pipeline(tmp_path: Path) -> None:
    def change(data: dict[str, Any]) -> None:
        data["strategy"] = {"name": "sar", "_target_": f"{SAR.__module__}.SAR"}

    assert "strategy=sar has one stage, but mesh has 2" in refusal(edited(written(tmp_path, "gnnpipe"), change))
    one = written(tmp_path / "one", "gnnpipe", "strategy.stages=1", "strategy.parts=2")
    assert "strategy=sar has no chunks, but arrays has chunk_of" in refusal(edited(one, change))


def test_the_codec_of_the_strategy_is_what_runs(tmp_path: Path) -> None:
    """bf16 in plan.json halves the bytes of halo rows."""
    file = written(tmp_path, "graph_parallel")
    exact = bytes_of(edited(file, lambda data: None))
    assert bytes_of(edited(file, lambda data: data["strategy"].update(codec=BF16))) == exact / 2


def bytes_of(settings: Settings) -> float:
    """Of halo rows of one epoch, in fp32."""
    assert settings.plan is not None
    job = make_job(settings.strategy, settings.model, small_graph(), world=2, epochs=1, dtype=torch.float32)
    given = replace(job, plan=given_plan(settings.plan, settings))
    return merge_ranks(given, ThreadWorld(2).run(given)).traffic[0]["forward"]


def test_tag_describes_what_it_chose() -> None:
    strategy: Strategy = TAG(rates="nominal")
    model = configured("model", "gcn", "model.hidden=8")
    plan: Plan = make_job(strategy, model, small_graph(), world=2).plan
    assert plan.predicted is not None
    assert {layer.mode for layer in strategy.describe(plan)} <= {"whole", "halo", "sar", "chunk"}
    assert TAG(rates="nominal").chosen(plan).describe(plan) == strategy.describe(plan)
    nothing = replace(plan, strategy={"name": "tag", "_target_": f"{TAG.__module__}.TAG"})
    with pytest.raises(ValueError, match="strategy=tag has to say what it chose; plan again"):
        strategy.describe(nothing)


def test_a_stage_of_parts_names_both_codecs() -> None:
    facts = Hybrid(stages=2, parts=2).describe(
        make_job(Hybrid(stages=2, parts=2), configured("model", "gcn", "model.hidden=8"), small_graph(), world=4).plan
    )
    assert {layer.how for layer in facts} == {"chunks, boundary identity, halo identity"}
