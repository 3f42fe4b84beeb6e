"""wordnet: synsets, pointers and glosses of dictionary files in the format wndb(5WN)."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

import gnnpar
from gnnpar.cli.main import run
from gnnpar.data.wordnet import POINTERS, WordNet

LICENCE = "  1 This software and database is being provided to you, the LICENSEE, by\n"


def synset(offset: int, lexicographer: int, kind: str, gloss: str, *pointers: str, words: int = 1) -> str:
    names = " ".join(f"word{i} 0" for i in range(words))
    ends = "".join(f" {pointer}" for pointer in pointers)
    frames = " 01 + 02 00" if kind == "v" else ""
    head = f"{offset:08} {lexicographer:02} {kind} {words:02x} {names} {len(pointers):03}"
    return f"{head}{ends}{frames} | {gloss}  \n"


def dictionary(folder: Path, *more: str) -> Path:
    """46 synsets: a chain of 36 nouns, 8 verbs, an adjective with a satellite, no adverb but `more`."""
    nouns = [
        synset(
            100 + i,
            5 if i % 2 else 18,
            "n",
            "an animal\x85 that runs" if i % 2 else "a person; who works | rests",
            *([f"@ {99 + i:08} n 0000"] if i else ["+ 00000200 v 0101", "! 00000300 a 0101"]),
            *([f"~ {101 + i:08} n 0000"] if i < 35 else []),
            words=17 if i == 3 else 1,
        )
        for i in range(36)
    ]
    verbs = [synset(200 + i, 38, "v", "move \xe9 fast") for i in range(8)]
    adjectives = [
        synset(300, 0, "a", "quick", "& 00000301 s 0000", "^ 00000301 s 0000"),
        synset(301, 0, "s", "rather quick", "& 00000300 a 0000"),
    ]
    for name, lines in (("noun", nouns), ("verb", verbs), ("adj", adjectives), ("adv", more)):
        (folder / f"data.{name}").write_text(LICENCE + "".join(lines), encoding="latin-1")
    return folder


def test_the_command_builds_it_and_prints_its_numbers(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("data", ["wordnet", f"dataset.path={dictionary(tmp_path)}", "dataset.self_loops=false"]) == 0
    lines = capsys.readouterr().out.splitlines()
    edges = 70 + 2 + 2  # of the chain, from its first noun, between adjectives
    assert lines[0] == f"wordnet: 46 nodes, {edges} edges, 45 classes"
    assert re.fullmatch(r"256 features; 9 training, 9 validation, 28 test nodes", lines[1])
    assert run("data", ["nothing"]) == 2


def test_synsets_are_nodes_and_pointers_edges(tmp_path: Path) -> None:
    data = WordNet(path=str(dictionary(tmp_path)), self_loops=False, num_features=16).load(None, 0)
    assert (data.num_nodes, data.num_classes, data.edges.type) == (46, 45, None)
    assert data.y.tolist() == [18, 5] * 18 + [38] * 8 + [0] * 2
    pairs = {(i, j) for i in range(36) for j in (i - 1, i + 1) if 0 <= j < 36}
    assert set(zip(*data.edge_index.tolist(), strict=True)) == pairs | {(0, 36), (0, 44), (44, 45), (45, 44)}
    words = ["a", "an", "animal", "person", "rests", "runs", "that", "who", "works", "fast", "move", "quick", "rather"]
    has = [{"a", "person", "who", "works", "rests"}, {"an", "animal", "that", "runs"}] * 18
    has += [{"move", "fast"}] * 8 + [{"quick"}, {"rather", "quick"}]
    expected = [[float(word in gloss) for word in words] + [0.0] * 3 for gloss in has]
    torch.testing.assert_close(data.x, torch.tensor(expected))
    assert [int(mask.sum()) for mask in (data.train_mask, data.val_mask, data.test_mask)] == [9, 9, 28]


def test_pointers_of_two_kinds_are_two_typed_edges(tmp_path: Path) -> None:
    data = WordNet(path=str(dictionary(tmp_path)), types=True).load(None, 0)
    assert data.edges.type is not None
    assert data.edge_sizes.types == len(POINTERS) == 26
    found = {
        (*pair, POINTERS[kind]) for *pair, kind in zip(*data.edge_index.tolist(), data.edges.type.tolist(), strict=True)
    }
    assert {(44, 45, "&"), (44, 45, "^"), (45, 44, "&"), (0, 36, "+"), (0, 1, "~"), (1, 0, "@")} <= found
    assert len(found) == data.num_edges == 75


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (synset(400, 45, "r", "late"), "data.adv: line 2 is not of the format"),
        ("00000400 02 r\n", "data.adv: line 2 is not of the format"),
        (synset(400, 2, "r", "late", "! 00000999 r 0101"), r"a pointer has \('r', '00000999'\)"),
        (synset(400, 2, "r", "late", "? 00000400 r 0101"), r"a pointer has '\?'"),
    ],
)
def test_malformed_files_are_one_line(tmp_path: Path, line: str, told: str) -> None:
    with pytest.raises(ValueError, match=told) as caught:
        WordNet(path=str(dictionary(tmp_path, line)), types=True).load(None, 0)
    assert "\n" not in str(caught.value)


def test_a_dictionary_that_is_not_installed_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gnnpar.data.wordnet.INSTALLED", tmp_path / "usr")
    with pytest.raises(ValueError, match=r"^dataset=wordnet: data\.noun, .* not found in .*/wordnet nor .*/usr\."):
        WordNet().load(tmp_path, 0)
    dictionary(tmp_path).joinpath("data.adv").unlink()
    with pytest.raises(ValueError, match=r"Fix: apt install wordnet-base, or dataset\.path=FOLDER\.$"):
        WordNet(path=str(tmp_path)).load(None, 0)


@pytest.mark.parametrize(("model", "typed"), [("sage", False), ("rgcn", True)])
def test_it_trains_with_and_without_types(tmp_path: Path, model: Any, typed: bool) -> None:
    (tmp_path / "wordnet").mkdir()
    dictionary(tmp_path / "wordnet")
    given: dict[str, Any] = {"data_dir": tmp_path, "epochs": 1, "folder": tmp_path / "run"}
    run = gnnpar.train(model, "wordnet", dataset={"types": typed}, **given)
    assert 0 <= run.result["metric"]["best_val"] <= 1
