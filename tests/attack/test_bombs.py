"""Small files whose tuples have no end, or are too deep for Python: refused before torch reads them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from checkpoints import ADAPTIVE, last, train
from gnnpar.durable import file_hash, read_checked_json, write_checked_json
from gnnpar.saved_tensors import load_saved
from gnnpar.training.checkpoint.state import check_tree, read_tree, write_tree
from gnnpar.training.result import trained

ONE = b"K\x01q\x00"  # the number 1, memo 0
STORAGE = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\n"


def doubled(times: int = 64) -> bytes:
    """(x, x) of what was before, so many times: two to that power of numbers."""
    return ONE + b"".join(b"h" + bytes([i]) + b"\x86q" + bytes([i + 1]) for i in range(times))


def deep(levels: int = 400_000) -> bytes:
    return ONE + b"\x85" * levels


CALLS = {
    "called": b"%s)R.",
    "made": b"%s)\x81.",
    "key": STORAGE + b"%sX\x03\x00\x00\x00cpuK\x04tQ.",
    "place": STORAGE + b"X\x01\x00\x00\x000%sK\x04tQ.",
    "storage": b"%sQ.",
    "argument": b"ctorch.serialization\n_get_layout\n%s\x85R.",
    "state": b"ccollections\nOrderedDict\n)R%sb.",
}


def saved(file: Path, body: bytes) -> Path:
    writer = torch._C.PyTorchFileWriter(str(file))
    for name, record in {"data.pkl": b"\x80\x02" + body, "byteorder": b"little", "data/0": bytes(16)}.items():
        writer.write_record(name, record, len(record))
    writer.write_end_of_file()
    return file


@pytest.mark.parametrize("call", list(CALLS))
@pytest.mark.parametrize("bomb", [doubled(), deep()], ids=["doubled", "deep"])
def test_a_tuple_without_end_is_refused(tmp_path: Path, call: str, bomb: bytes) -> None:
    """In a process of its own: torch dies of some, and is never done with the others."""
    file = saved(tmp_path / "bomb.pt", CALLS[call].replace(b"%s", bomb))
    code = "import sys; from pathlib import Path; from gnnpar.saved_tensors import load_saved\n"
    code += "try: load_saved(Path(sys.argv[1]))\nexcept ValueError as error: print(error)"
    command = [sys.executable, "-P", "-c", code, str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr[-300:]
    assert done.stdout.startswith("it ")


def test_objects_that_hold_each_other_twice_are_refused(tmp_path: Path) -> None:
    body = b"ccollections\nOrderedDict\n)Rq\x000"
    for i in range(40):  # {a: the one before, b: the one before}, which is kept and taken off the stack
        before = b"h" + bytes([i])
        body += b"ccollections\nOrderedDict\n)R(X\x01\x00\x00\x00a" + before + b"X\x01\x00\x00\x00b" + before
        body += b"uq" + bytes([i + 1]) + b"0"
    file = saved(tmp_path / "bomb.pt", body + b"ctorch.serialization\n_get_layout\nh\x28\x85R.")
    with pytest.raises(ValueError, match="one list to many objects"):
        load_saved(file)


def nested(kind: str, times: int) -> object:
    tree: object = ()
    for _ in range(times):
        tree = {"tuple": (tree, tree), "list": [tree, tree], "dict": {"a": tree, "b": tree}}[kind]
    return tree


@pytest.mark.parametrize("flaw", ["tuple", "list", "dict", "circle", "deep"])
def test_a_state_is_held_to_stand_in_its_file_once(tmp_path: Path, flaw: str) -> None:
    """A slot of an optimizer that nobody knows was kept, and written out, without end, into the next checkpoint."""
    train(tmp_path / "run", "strategy=single", "epochs=2")
    folder = last(tmp_path / "run").folder
    tree = read_tree(folder / "rank-0.pt", torch.device("cpu"))
    circle: list[object] = []
    circle.append(circle)
    below: object = 1
    for _ in range(150):
        below = [below]
    bad = {"circle": circle, "deep": below}.get(flaw) or nested(flaw, 40)
    slots = next(iter(tree["optimizer"]["state"].values()))
    slots["extra"] = ({}, [], (), ("a",), ("a",))  # equal, and not the same but for the empty tuple
    write_tree(tmp_path / "good.pt", tree)
    check_tree(tmp_path / "good.pt")
    slots["extra"] = bad
    torch.save(tree, tmp_path / "bad.pt")
    with pytest.raises(ValueError, match="one dict, list or tuple in several places, or too many in each other"):
        check_tree(tmp_path / "bad.pt")


@pytest.mark.parametrize(
    ("flaw", "line"), [("step", "is no count"), ("engine", "another state than this strategy leaves")]
)
def test_a_state_that_cannot_be_gone_on_from_is_a_line(tmp_path: Path, flaw: str, line: str) -> None:
    made = ("strategy=adaqp", "world_size=2", *ADAPTIVE)
    train(tmp_path / "run", *made, "epochs=3")
    folder = last(tmp_path / "run").folder
    manifest = read_checked_json(folder / "manifest.json")
    for rank in (0, 1):
        file = folder / f"rank-{rank}.pt"
        tree = read_tree(file, torch.device("cpu"))
        if flaw == "step":
            next(iter(tree["optimizer"]["state"].values()))["step"] = torch.tensor(-3.0)
        else:
            tree["engine"] = {"codecs": [{"codes": 3}] * 9}
        manifest["files"][file.name] = write_tree(file, tree)
    write_checked_json(folder / "manifest.json", manifest)
    outcome = train(tmp_path / "next", *made, "epochs=5", f"resume={tmp_path / 'run'}")
    assert outcome.status == "failed"
    assert line in str(outcome.error)


def forged(source: Path, folder: Path, *, val: float, epoch: int) -> None:
    """A checkpoint of a run's, which names another model, with its checksums made again."""
    folder.mkdir(parents=True)
    (folder / "rank-0.pt").write_bytes((source / "rank-0.pt").read_bytes())
    manifest = read_checked_json(source / "manifest.json")
    manifest["run"]["settings"]["model"] = {"_target_": "subprocess.Popen", "args": ["touch", "ran"]}
    manifest["files"]["rank-0.pt"]["sha256"] = file_hash(folder / "rank-0.pt")
    write_checked_json(folder / "manifest.json", {**manifest, "val": val, "epoch": epoch})


def test_what_lay_in_the_folder_of_a_run_is_not_its_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder of somebody else, in which the caller trains his own model."""
    import gnnpar

    monkeypatch.chdir(tmp_path)
    given = {"strategy": "single", "debug": "tiny", "world_size": 1, "comm": "threads"}
    gnnpar.train("gcn", "sbm", folder="source", epochs=3, **given)
    good = last(tmp_path / "source").folder
    forged(good, tmp_path / "theirs", val=1e9, epoch=3)
    run = gnnpar.train("gcn", "sbm", folder="theirs", epochs=2, **given)
    assert trained.find(tmp_path / "theirs", "best")[0].epoch == 2
    assert run.model.epoch == 2
    forged(good, tmp_path / "without", val=1e9, epoch=3)
    none = gnnpar.train("gcn", "sbm", folder="without", epochs=2, checkpoint={"keep": 0}, **given)
    with pytest.raises(ValueError, match="has no good checkpoint"):
        _ = none.model
    forged(good, tmp_path / "source" / "checkpoint" / "epoch-000001", val=1e9, epoch=1)
    again = gnnpar.train("gcn", "sbm", folder="source", epochs=4, resume="auto", **given)
    with pytest.raises(ValueError, match=r"names subprocess\.Popen, which is no class of gnnpar"):
        _ = again.model
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "theirs" / "ran").exists()
