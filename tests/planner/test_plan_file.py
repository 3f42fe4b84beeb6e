"""plan.json: a round trip, and one reason for every plan that cannot run."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from gnnpar.placement import Placement, Plan
from outcomes import refused


def pipeline() -> Plan:
    """Two stages of two parts, four layers, three chunks, 12 nodes."""
    part_of = torch.tensor([0, 1] * 6)
    chunk_of = torch.arange(12) % 3
    return Plan(
        Placement(((0, 1), (2, 3)), part_of, chunk_of, (range(2), range(2, 4))),
        strategy={"name": "hybrid", "stages": 2},
        hashes={"graph": "a" * 64, "split": "b" * 64},
        statistics={"alpha": 0.5},
        predicted={"epoch_seconds": 0.25, "peak_bytes": [2**30, 2**29, 2**30, 2**29]},
        quality=("quantized", "stale"),
        devices=("h0/0", "h0/1", "h1/0", "h1/1"),
        setup={"names": {"model": "gcn"}, "model": {"hidden": 8}},
    )


def test_round_trip(tmp_path: Path) -> None:
    plan = pipeline()
    again = Plan.load(plan.save(tmp_path))
    assert again.placement.mesh == plan.placement.mesh
    assert torch.equal(again.part_of, plan.part_of)
    assert again.placement.chunk_of is not None
    assert torch.equal(again.placement.chunk_of, torch.arange(12) % 3)
    names = ("strategy", "hashes", "statistics", "predicted", "quality", "devices", "setup", "num_ranks")
    assert [getattr(again, n) for n in names] == [getattr(plan, n) for n in names]
    assert again.placement.layers_of == plan.placement.layers_of
    again.verify(num_layers=4, num_nodes=12, graph="a" * 64, split="b" * 64)
    assert again.save(tmp_path / "b").read_text() == (tmp_path / "plan.json").read_text()


def test_a_vertex_cut_is_part_of_the_plan(tmp_path: Path) -> None:
    edges = torch.tensor([0, 1, 1, 0, 1])
    plan = placed(edge_part_of=edges)(pipeline())
    again = Plan.load(plan.save(tmp_path))
    assert again.placement.edge_part_of is not None
    assert torch.equal(again.placement.edge_part_of, edges)
    assert again.without_nodes().placement.edge_part_of is None
    again.verify(num_nodes=12, num_edges=5)
    with pytest.raises(ValueError, match="the plan places 5 edges, the graph has 6: plan again"):
        again.verify(num_edges=6)


def placed(**changes: object) -> Callable[[Plan], Plan]:
    return lambda plan: replace(plan, placement=replace(plan.placement, **changes))


MUTATIONS: dict[str, Callable[[Plan], Plan]] = {
    "a stage of mesh=[[0, 1], []] has no rank": placed(mesh=((0, 1), ())),
    "mesh has the ranks [0, 1, 1, 2], not 0 to 3": placed(mesh=((0, 1), (1, 2))),
    "mesh has the ranks [0, 1, 2, 4], not 0 to 3": placed(mesh=((0, 1), (2, 4))),
    "stages have [1, 2] parts": placed(mesh=((0, 1), (2,))),
    "layers_of has 1 stages, mesh 2": placed(layers_of=(range(4),)),
    "stage 0 has no layer": placed(layers_of=(range(0), range(4))),
    "stage 1 begins with layer 3, not with 2": placed(layers_of=(range(2), range(3, 4))),
    "part_of goes from 0 to 2, but there are 2 parts": placed(part_of=torch.tensor([0, 1, 2] * 4)),
    "part 1 has no node": placed(part_of=torch.zeros(12, dtype=torch.long)),
    "chunk_of has 11 nodes, part_of 12": placed(chunk_of=torch.zeros(11, dtype=torch.long)),
    "chunk_of goes from -1 to 10, but there are 12 chunks": placed(chunk_of=torch.arange(12) - 1),
    "chunk 1 has no node": placed(chunk_of=torch.tensor([0, 2] * 6)),
    "edge_part_of goes from 0 to 2, but there are 2 parts": placed(edge_part_of=torch.tensor([0, 2, 1])),
    "devices names 3 places for 4 ranks": lambda plan: replace(plan, devices=("a", "b", "c")),
    "devices puts two ranks on one device": lambda plan: replace(plan, devices=("a", "b", "c", "c")),
    "strategy.name=3 is no name": lambda plan: replace(plan, strategy={"name": 3}),
}


@pytest.mark.parametrize("said", MUTATIONS)
def test_mutated_plans_are_rejected(said: str, tmp_path: Path) -> None:
    """From the file, as `gnnpar train plan=` reads it."""
    with refused("the plan cannot run: .*" + re.escape(said)):
        Plan.load(MUTATIONS[said](pipeline()).save(tmp_path)).verify(num_nodes=12)


def test_a_plan_of_more_ranks_than_anybody_has_is_refused_in_a_short_line(tmp_path: Path) -> None:
    """In time that grows with their number, not with its square."""
    mesh = (tuple(range(1, 100_001)), tuple(range(100_001, 200_001)))
    with pytest.raises(ValueError, match=r"mesh has the ranks \[1, 2, .*, not 0 to 199999") as caught:
        Plan.load(placed(mesh=mesh)(pipeline()).save(tmp_path)).verify(num_nodes=12)
    assert len(str(caught.value)) < 200


def test_a_plan_for_something_else() -> None:
    plan = pipeline()
    for given, said in (
        ({"graph": "c" * 64}, "the plan was made for another graph (aaaaaaaaaaaa, here cccccccccccc)"),
        ({"num_layers": 3}, "the plan has 4 layers, the model 3: set model.num_layers=4"),
        ({"num_nodes": 13}, "the plan places 12 nodes, the graph has 13"),
    ):
        with pytest.raises(ValueError, match=re.escape(said)):
            plan.verify(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda d: d | {"stage": 1}, "stage=1: Extra inputs are not permitted"),
        (lambda d: {k: v for k, v in d.items() if k != "hashes"}, "hashes is missing"),
        (lambda d: d | {"schema": 2}, "schema=2: Input should be 1"),
        (
            lambda d: d | {"arrays": d["arrays"] | {"order": "a.npy"}},
            "arrays.order.[key]=order: Input should be",
        ),
        (lambda d: d | {"layers_of": []}, "layers_of=[]: List should have at least 1 item"),
        (lambda d: d | {"setup": ""}, "setup=: Input should be an object"),
        (lambda d: d | {"devices": ["a", [[]]]}, "devices.1=[[]]: Input should be a valid string"),
        (lambda d: d | {"devices": "abcd"}, "devices=abcd: Input should be a valid array"),
        (lambda d: d | {"quality": [1]}, "quality.0=1: Input should be a valid string"),
        (lambda d: d | {"arrays": {"part_of": "missing.npy"}}, "cannot be read (FileNotFoundError)"),
    ],
)
def test_malformed_files(change: Callable[[dict], dict], said: str, tmp_path: Path) -> None:
    file = pipeline().save(tmp_path)
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    with pytest.raises(ValueError, match=re.escape(said)):
        Plan.load(file)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"hashes": {"graph": "0", "split": "0", "partition": "../../elsewhere"}}, "hashes.partition=../../elsewhere"),
        ({"layers_of": [[0, 1 << 40]]}, r"layers_of.0.1=1099511627776: Input should be less than or equal to 10000"),
        ({"predicted": 3}, "predicted=3: Input should be an object"),
    ],
)
def test_what_a_checkpoint_has_of_a_plan_is_checked_as_a_file_is(change: dict, said: str) -> None:
    """Its partition's hash is the name of a file that is written."""
    plan = pipeline()
    data = json.loads(json.dumps(plan.as_data(dict.fromkeys(plan.arrays, "rank-0.pt"))))
    assert Plan.of_data(data, plan.arrays).placement.layers_of == plan.placement.layers_of
    with pytest.raises(ValueError, match=said):
        Plan.of_data(data | change, plan.arrays)


def test_a_changed_array_is_noticed(tmp_path: Path) -> None:
    file = pipeline().save(tmp_path)
    name = json.loads(file.read_text())["arrays"]["part_of"]
    import numpy as np

    np.save(tmp_path / name, np.zeros(12, dtype=np.int32))
    with pytest.raises(ValueError, match="was changed: its contents differ from the hash in its name"):
        Plan.load(file)


def test_plans_without_the_new_fields_still_load(tmp_path: Path) -> None:
    file = pipeline().save(tmp_path)
    data = json.loads(file.read_text())
    del data["quality"], data["devices"]
    file.write_text(json.dumps(data))
    assert (Plan.load(file).quality, Plan.load(file).devices) == (None, ())
