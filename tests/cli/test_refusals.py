"""Commands that are refused before a rank starts: exit code 2, and one line that says what is wrong."""

import shlex
from pathlib import Path

import pytest

import gnnpar
from conftest import Refused

NO_RESULT = "a job is the same wherever its data lies, and whatever it keeps"
CLUSTERS = "dataset=sbm strategy=minibatch strategy.sampler=cluster strategy.clusters=1000000"
ONE_JOB = "train dataset=sbm strategy=single epochs=1"


@pytest.mark.parametrize(
    ("command", "line"),
    [
        ("trian", "unknown command trian, did you mean train?; there are train, partition, plan"),
        ("train strategy=singel", "strategy=singel does not exist, did you mean single?; strategy can be"),
        ("train strategy=gnnpipe world_size=4", "2 layers cannot fill 4 stages: use model.num_layers=4 or more"),
        ("train strategy=single strategy.logical_parts=2", "strategy has no keys; it is a key of strategy=sar"),
        ("train strategy=gnnpipe first_layer=cached", "first_layer=cached is for strategies without chunks or batches"),
        (
            f"train {CLUSTERS}",
            "strategy.clusters=1000000, but the graph has 3000 nodes: give at most one cluster a node",
        ),
        ("train debug=null dataset=sbm", "debug=null: a group is chosen by a name"),
        (f"train epochs={'[' * 3000}{']' * 3000}", "nested too deep"),
        ("train resume=nowhere", "resume=nowhere holds no checkpoint; give the folder of a run with checkpoint/"),
        ("train launch.cuda_graph=true device=cpu", "launch.cuda_graph=true replays work of a GPU, and this run is on"),
        ("train model=broken strategy=single", "model/broken.yaml is no YAML: "),
        ("check model=broken", "model/broken.yaml is no YAML: "),
        ("train --resume sweep", "there is no option --resume; gnnpar train has"),
        ("train -m strategy=single,grap_parallel", "grap_parallel does not exist, did you mean graph_parallel?"),
        ("train -m sede=0,1", "unknown key sede=0, did you mean seed?"),
        ("train -m data_dir=a,b", "data_dir=a,b: a job is the same wherever its data lies"),
        (f"{ONE_JOB} -m checkpoint.every=0,1", NO_RESULT),
        (f"{ONE_JOB} -m trace=true,false", NO_RESULT),
        (f"{ONE_JOB} -m tracker=jsonl,console", NO_RESULT),
        ("train -m seed=range(0,10000000)", "the sweep asks for more than 100,000 jobs"),
        (f"{ONE_JOB} -m seed=0,1 hydra.sweep.subdir=same", "hydra.sweep.subdir=same is one folder for several jobs"),
        ("train -m 'model=glob(zzz*)'", "the sweep has no job"),
        ("train -m seed=range(5,1)", "the sweep has no job"),
        ("train -m dataset=sbm hydra.sweeper=null", ""),
        ("train -m dataset=sbm hydra.launcher=null", ""),
        ("train -m dataset=sbm hydra.sweeper._target_=os.system", ""),
        ("train -m dataset=sbm -p", ""),
        (f"train -m dataset=sbm seed={'9' * 5000}", ""),
        ("train -m hydra/sweeper=optuna \"hydra.sweeper.params={seed: 'range(0,2)'}\"", "cannot be used ("),
        ("status .", "no jobs of a sweep below"),
        ("export nowhere", "nowhere has no good checkpoint; give the folder of a run"),
        ("ablate nowhere.yaml", "nowhere.yaml cannot be read: No such file"),
        ("ablate study.yaml epochs=3", "study.yaml sets what is trained; put it into base"),
        ("plan dataset=sbm --out ''", "an argument is empty"),
    ],
    ids=lambda value: value[:50],
)
def test_command_is_refused_in_one_line(refused: Refused, tmp_path: Path, command: str, line: str) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "broken.yaml").write_text("a: [1\nb: {")
    (tmp_path / "study.yaml").write_text("factors: {x: [codec=bf16]}")
    said = refused(line, *shlex.split(command))
    assert "is no YAML" not in line or "in line 2; correct it" in said
    assert not list(tmp_path.rglob("result.json"))


@pytest.mark.parametrize("key", ["hydra.run.dir=", "hydra.run.dir=''", "cache_dir=", "resume=", "shards=", "plan="])
def test_empty_path_is_refused(refused: Refused, tmp_path: Path, key: str) -> None:
    (tmp_path / "config.yaml").write_text("mine")
    refused("is empty, and names nothing", *ONE_JOB.split(), key)
    assert (tmp_path / "config.yaml").read_text() == "mine"
    with pytest.raises(ValueError, match="folder is empty"):
        gnnpar.train("gcn", "sbm", folder="")


def test_study_under_torchrun_is_refused(refused: Refused, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    refused("a study starts its own ranks and cannot join those of torchrun", "ablate", "study.yaml")
