"""Training from shards on disk: the same bits as from memory, and no rank ever holds the whole graph."""

import json
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch_geometric.nn.models.basic_gnn import PNA
from torch_geometric.utils import degree

import gnnpar
from checkpoints import SMALL, hashes, last, rows, strategy_of, train
from conftest import ROOT, Refused, Run, environment
from gnnpar.cli.partition import run as partition
from gnnpar.cli.train import run_training
from gnnpar.config.compose import compose
from gnnpar.folds.edge_data import EdgeSizes
from gnnpar.models.pyg.model import PyG
from gnnpar.settings import ConfigError
from ports import free_port

GRAPH = ("dataset.num_nodes=200", "dataset.avg_degree=6", "dataset.num_features=12")
RUN = tuple(o for o in SMALL if o not in GRAPH)


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("shards") / "made"
    ids = ("model=gat", "model.attention_dropout=0.5")
    assert partition([*GRAPH, *ids, "partition=fennel", "world_size=2", f"out={out}"]) == 0
    return out


def from_disk(folder: Path, shards: Path, *overrides: str) -> None:
    folder.mkdir()
    outcome = run_training(compose([*RUN, f"shards={shards}", *overrides]), folder)
    assert outcome.exit_code == 0, outcome.error


CASES = [
    ("graph_parallel", ()),
    ("graph_parallel", ("model=gat", "model.attention_dropout=0.5", "first_layer=cached")),
    ("adaqp", ()),
    ("sar", ("model=gat", "precision=fp64")),
    ("adaqp_p", ("model=sage_max",)),
]


@pytest.mark.quick(1)
@pytest.mark.parametrize(("strategy", "overrides"), CASES, ids=lambda value: "-".join(value) if value else "")
def test_the_same_bits_as_from_memory(tmp_path: Path, shards: Path, strategy: str, overrides: tuple) -> None:
    given = (*strategy_of(strategy), *overrides, "epochs=4")
    from_disk(tmp_path / "disk", shards, *given)
    profile = tmp_path / "disk/profile.json"  # what was measured decides on numbers: it is replayed
    replayed = (f"profile={profile}",) if profile.exists() else ()
    assert train(tmp_path / "memory", "partition=fennel", *given, *replayed).exit_code == 0
    assert hashes(tmp_path / "disk") == hashes(tmp_path / "memory")
    assert rows(tmp_path / "disk") == rows(tmp_path / "memory")
    assert rows(tmp_path / "disk")[-1]["metric/test"] is not None
    plans = [json.loads((tmp_path / name / "plan.json").read_text()) for name in ("disk", "memory")]
    for key in ("mesh", "layers_of", "arrays", "hashes", "statistics"):
        assert plans[0][key] == plans[1][key]
    name = plans[0]["arrays"]["part_of"]
    assert (tmp_path / "disk" / name).read_bytes() == (tmp_path / "memory" / name).read_bytes()


def test_processes_give_these_bits_too(run_here: Run, tmp_path: Path, shards: Path) -> None:
    """The command, in a folder that is named like a group of Hydra."""
    (tmp_path / "shards").symlink_to(shards)
    done = run_here("train", "shards=shards", *RUN, "comm=gloo", "epochs=3", "hydra.run.dir=processes")
    assert done.returncode == 0, done.stderr
    assert train(tmp_path / "memory", "partition=fennel", "epochs=3").exit_code == 0
    assert hashes(tmp_path / "processes") == hashes(tmp_path / "memory")
    losses = [[row["loss/train"] for row in rows(tmp_path / name)] for name in ("processes", "memory")]
    assert losses[0] == losses[1]
    result = json.loads((tmp_path / "processes/result.json").read_text())
    assert (result["dataset"], result["world_size"], result["transport"]) == ("sbm", 2, "gloo")


def test_a_run_from_memory_goes_on_from_one_from_shards(tmp_path: Path, shards: Path) -> None:
    from_disk(tmp_path / "disk", shards, "epochs=2")
    assert train(tmp_path / "on", "partition=fennel", "epochs=4", f"resume={tmp_path / 'disk'}").exit_code == 0
    assert train(tmp_path / "memory", "partition=fennel", "epochs=4").exit_code == 0
    assert hashes(tmp_path / "on") == hashes(tmp_path / "memory")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (("strategy=gnnpipe",), "strategy=gnnpipe cuts the whole graph, which shards=.* hold for no rank"),
        (("strategy=sar", "strategy.logical_parts=2"), "strategy=sar cuts the whole graph"),
        (("world_size=3",), "are 2 parts, but there are 3 ranks: set world_size=2, or partition again"),
        (("dataset=cora",), "dataset=cora and shards=.*: the shards set the dataset; leave one of them out"),
        (("partition.seed=1",), "the shards set the partition"),
        (("plan=plan.json",), "the shards set the plan"),
        (("shards.check=none",), r"shards\.check=none must be one of full, header"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_what_shards_cannot_serve_is_one_line(tmp_path: Path, shards: Path, overrides: tuple, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        run_training(compose([*RUN, f"shards={shards}", *overrides]), tmp_path)


def test_damage_and_missing_ids_end_a_run_in_one_line(tmp_path: Path) -> None:
    out = tmp_path / "shards"
    assert partition([*GRAPH, "world_size=2", "partition=range", f"out={out}"]) == 0
    (tmp_path / "r").mkdir()
    settings = compose([*RUN, f"shards={out}", "epochs=2", "model=gat", "model.attention_dropout=0.5"])
    assert "hold no edge ids, which this model reads (for attention dropout" in (
        run_training(settings, tmp_path / "r").error or ""
    )
    file = out / "part-1/x.npy"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    told = run_training(compose([*RUN, f"shards={out}", "epochs=2"]), tmp_path / "r").error or ""
    assert "part-1/x.npy is corrupt" in told
    assert "\n" not in told
    unchecked = compose([*RUN, f"shards={out}", "epochs=2", "shards.check=header"])
    assert run_training(unchecked, tmp_path / "r").exit_code == 0
    file.write_bytes(data[:-9])
    with pytest.raises(ValueError, match=r"part-1/x\.npy is \d+ bytes, not \d+"):
        run_training(compose([*RUN, f"shards={out}"]), tmp_path / "r")


@pytest.mark.slow
@pytest.mark.parametrize("lacks", ["the folder", "a file of its part"])
def test_joined_ranks_end_at_once_where_one_lacks_its_shards(tmp_path: Path, shards: Path, lacks: str) -> None:
    """Rank 1, on another host, has an incomplete copy of the shards: both ranks end with its line and exit code 2."""
    mine = tmp_path / "1" / "shards"
    for rank in (0, 1):
        shutil.copytree(shards, tmp_path / str(rank) / "shards")
    if lacks == "the folder":
        shutil.rmtree(mine)
    else:
        next((mine / "part-1").glob("*.npy")).unlink()
    command = [sys.executable, "-m", "gnnpar", "train", *RUN, "shards=shards", "hydra.run.dir=run", "checkpoint.keep=0"]
    command = [o for o in command if not o.startswith(("world_size", "comm="))]
    env = environment() | {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "LOCAL_RANK": "0"}
    env["MASTER_PORT"] = str(free_port())
    began = time.monotonic()
    places = {str(rank): {"cwd": tmp_path / str(rank), "env": env | {"RANK": str(rank)}} for rank in (0, 1)}
    started = [subprocess.Popen(command, **place, text=True, stderr=subprocess.PIPE) for place in places.values()]
    lines = [process.communicate(timeout=100)[1] for process in started]
    assert lines[0] == lines[1].replace("gnnpar: ", f"gnnpar: rank 1 on {socket.gethostname()}: ", 1)
    assert [line.count("\n") for line in lines] == [1, 1]
    assert [process.returncode for process in started] == [2, 2]
    assert time.monotonic() - began < 60, "half of comm.connect_seconds"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("dataset=sbm", "out=FOLDER is given 0 times"),
        ("dataset=sbm out=.", "is there already; remove it, or name another folder"),
        ("shards=x out=y", "shards=x: gnnpar partition takes"),
        ("dataset=folder out=y", "dataset.path is not set"),
        ("dataset=sbm world_size=4000 out=y", "cannot fill 4000 parts"),
    ],
)
def test_command_that_cannot_partition_is_refused(refused: Refused, tmp_path: Path, arguments: str, said: str) -> None:
    refused(said, "partition", *arguments.split())
    assert list(tmp_path.iterdir()) == []


def test_one_part_is_for_the_single_device(run_here: Run, refused: Refused, tmp_path: Path) -> None:
    done = run_here("partition", *GRAPH, "world_size=1", "out=shards")
    assert "0.0% of the edges are cut, alpha 0.000" in done.stdout
    from_disk(tmp_path / "run", tmp_path / "shards", "strategy=single", "epochs=2")
    assert train(tmp_path / "memory", "strategy=single", "epochs=2").exit_code == 0
    assert hashes(tmp_path / "run") == hashes(tmp_path / "memory")
    refused("gnnpar plan reads the whole graph", "plan", "shards=shards")


MEASURE = """
import json, sys
sys.path.insert(0, {study!r})
from pathlib import Path
from shards_memory import sample
from shards_memory.generate import generate
generate(Path("graph"), nodes=400_000, edges=3_200_000, features=192)
torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
ranks = [*torchrun, "-m", "gnnpar", "train"]
cut = [sys.executable, "-m", "gnnpar", "partition", "world_size=2"]
run = ["model=gcn", "model.hidden=8", "epochs=2", "eval_every=2", "threads_per_rank=1", "checkpoint.keep=0"]
graph = ["dataset=folder", "dataset.path=graph", "dataset.symmetrize=true", "partition=ldg"]
commands = [
    [*cut, "dataset=sbm", "out=small"], [*cut, *graph, "out=large"], [*ranks, *run, "shards=small"],
    [*ranks, *run, "shards=large"], [*ranks, *run, *graph],
]
told = [sample.run(command, limit_bytes=2**40) for command in commands]
print(json.dumps([[each["ended"], each["peaks"], each["output"]] for each in told]))
"""


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_no_process_holds_what_would_be_the_whole_graph(run_python: Run) -> None:
    """400 k nodes with 192 features and 3.5 M edges: 293 MiB and, as pairs of int64, 53 MiB. Counted is anonymous
    memory above that of the same command with a small graph; mapped files are not in it."""
    script = MEASURE.format(study=str(ROOT / "experiments"))
    done = run_python("-c", script, timeout=1100)
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert [each[0] for each in told] == [0] * 5, told
    small_cut, large_cut, small, disk, memory = (
        {role: values[1] for role, values in peaks.items()} for _, peaks, _ in told
    )
    features, edges = 192 * 4 * 400_000, 16 * 3_500_000
    assert large_cut["parent"] - small_cut["parent"] < features + edges, "a few integers a node, and a chunk"
    assert memory["rank 0"] - small["rank 0"] > features + edges, "rank 0 reads all of it"
    for rank in ("rank 0", "rank 1"):
        assert disk[rank] - small[rank] < features, "not the whole graph, nor a copy of what is mapped"


def test_pyg_model_takes_self_loops_from_the_shards(tmp_path: Path) -> None:
    graph = ["dataset=sbm", "dataset.num_nodes=60", "dataset.self_loops=false", "partition=range", "world_size=2"]
    assert partition([*graph, f"out={tmp_path}/shards"]) == 0
    asked = ["model=pyg", "model.target=torch_geometric.nn.models.GCN", f"shards={tmp_path}/shards"]
    assert compose(asked).resolved["model"]["self_loops"] is False
    assert compose([*asked, "model.self_loops=true"]).resolved["model"]["self_loops"] is True


def test_shards_keep_the_seed_that_drew_their_graph(tmp_path: Path) -> None:
    drawn = ["dataset.graph_seed=null", "dataset.split=random", "dataset.split_seed=null", "seed=3"]
    graph = ["dataset=sbm", "dataset.num_nodes=60", "partition=range", "world_size=2", *drawn]
    assert partition([*graph, f"out={tmp_path}/shards"]) == 0
    there = compose([f"shards={tmp_path}/shards", "seed=5"]).resolved["dataset"]
    assert (there["graph_seed"], there["split_seed"], there["split_index"]) == (3, 3, 0)


def test_a_pyg_model_says_that_shards_hold_other_edges(
    tmp_path: Path, shards: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """gnnpar's models get self loops and no repeated edges by default, PyG's the edges as they are."""
    sage = ("model=pyg", "model.target=torch_geometric.nn.models.GraphSAGE")
    sage += ("model.kwargs.hidden_channels=4", "model.kwargs.num_layers=2")
    run = (*(o for o in RUN if not o.startswith("model")), *sage, "strategy=graph_parallel", "epochs=1")
    assert partition([*GRAPH, *sage, "world_size=2", f"out={tmp_path / 'same'}"]) == 0
    for folder, cut in ((shards, True), (tmp_path / "same", False)):
        (tmp_path / f"run-{cut}").mkdir()
        capsys.readouterr()
        assert run_training(compose([*run, f"shards={folder}"]), tmp_path / f"run-{cut}").exit_code == 0
        line = "were cut with dataset.self_loops=true dataset.drop_duplicates=true; for the edges as PyG's own loop"
        assert (line in capsys.readouterr().err) == cut


PNA_GRAPH = ("dataset.num_nodes=60", "dataset.avg_degree=6", "dataset.num_features=12", "dataset.self_loops=false")
PNA_MODEL = ("model=pyg", "model.target=torch_geometric.nn.models.PNA", "model.kwargs.aggregators=[mean,max]")
PNA_MODEL += ("model.kwargs.hidden_channels=4", "model.kwargs.num_layers=1")
PNA_MODEL += ("model.kwargs.scalers=[amplification,linear]",)
PNA_RUN = (*PNA_MODEL, *(o for o in RUN if not o.startswith("model")), "epochs=2", "checkpoint.every=2")


@pytest.fixture(scope="module")
def pna(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pna") / "run"
    folder.mkdir()
    assert run_training(compose([*PNA_GRAPH, *PNA_RUN]), folder).exit_code == 0
    return folder


def test_a_loaded_model_has_the_degrees_of_the_graph_it_was_trained_on(pna: Path) -> None:
    dataset = compose([*PNA_GRAPH, *PNA_RUN]).load_dataset()
    want = torch.bincount(degree(dataset.edge_index[1], dataset.num_nodes).long())
    assert len(want) > 4
    found = gnnpar.load(pna, trust=True).model
    assert isinstance(found.config, PyG)
    assert found.config.kwargs["deg"] == want.tolist()
    kwargs = {"aggregators": ["mean", "max"], "scalers": ["amplification", "linear"], "deg": want}
    theirs = PNA(12, 4, 1, found.out_dim, **kwargs)
    for name, buffer in theirs.named_buffers():
        assert torch.equal(found.get_buffer(f"net.{name}"), buffer)
    theirs.load_state_dict({name.removeprefix("net."): value for name, value in found.state_dict().items()})


def test_shards_give_the_degrees_of_all_parts(pna: Path, tmp_path: Path) -> None:
    shards, there = tmp_path / "shards", tmp_path / "there"
    assert partition([*PNA_GRAPH, *PNA_MODEL, "world_size=2", f"out={shards}"]) == 0
    there.mkdir()
    assert run_training(compose([*PNA_RUN, f"shards={shards}", "model.self_loops=false"]), there).exit_code == 0
    assert [row["loss/train"] for row in rows(there)] == [row["loss/train"] for row in rows(pna)]
    assert last(there).manifest["run"]["degrees"] == last(pna).manifest["run"]["degrees"]


def test_own_histogram_is_taken_and_a_missing_one_refused() -> None:
    kwargs = {"hidden_channels": 4, "num_layers": 1, "aggregators": ["mean"], "scalers": ["linear"]}
    own = PyG(target="torch_geometric.nn.models.PNA", kwargs={**kwargs, "deg": [0, 0, 5]})
    assert float(own.build(6, 3, seed=0).get_buffer("net.convs.0.aggr_module.avg_deg_lin")) == 2.0
    with pytest.raises(ValueError, match="needs deg, and in-degrees were not counted"):
        PyG(target="torch_geometric.nn.models.PNA", kwargs=kwargs).on(EdgeSizes())
