"""wordnet: the synsets of WordNet 3.0 (Fellbaum 1998) as a graph, from the dictionary files of Debian's wordnet-base.

A node is a synset, in the order of FILES and their lines. Its class is its lexicographer file (noun.animal,
verb.motion, ...). An edge is a pointer of a synset or of one of its words; its type is the index of its symbol in
POINTERS. x [N, F] is 1 where the gloss has one of the F commonest words, else 0; words of the synset itself are
not read. Format of the files: wndb(5WN).
"""

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import numpy as np
import torch
from annotated_types import Ge, Gt, Lt

from gnnpar.data.dataset import Dataset
from gnnpar.data.preprocess import Preprocess, prepare
from gnnpar.data.raw import RawGraph
from gnnpar.folds.edge_data import EdgeData, SelfLoops
from gnnpar.paths import expanded

FILES = {"n": "data.noun", "v": "data.verb", "a": "data.adj", "r": "data.adv"}  # by part of speech; s is in data.adj
POINTERS = "! @ @i ~ ~i #m #s #p %m %s %p = + ;c -c ;r -r ;u -u * > ^ $ & < \\".split()  # noqa: SIM905
NUM_CLASSES = 45
INSTALLED = Path("/usr/share/wordnet")
Synset = tuple[int, list[tuple[str, str, str]], str]  # class, pointers (symbol, offset, part of speech), gloss


@dataclass(frozen=True, kw_only=True)
class WordNet(Preprocess):
    """Every field is a key of `dataset=wordnet`. path: null is the folder wordnet of data_dir, or INSTALLED."""

    name: str = "wordnet"
    path: str | None = None
    types: bool = False  # one edge per kind of pointer between two synsets
    num_features: Annotated[int, Ge(1)] = 256
    split: Literal["public", "per_class", "random"] = "random"
    train_fraction: Annotated[float, Gt(0), Lt(1)] = 0.2

    @property
    def loops(self) -> SelfLoops:
        """Self loops: none with types, since an added loop has no type."""
        return not self.types if self.self_loops == "auto" else self.self_loops

    def load(self, data_dir: Path | None, seed: int) -> Dataset:
        synsets = _read(self, data_dir)
        place = {key: node for node, key in enumerate(synsets)}
        kind = {symbol: i for i, symbol in enumerate(POINTERS)}
        try:
            edges = {
                (node, place[part, offset], kind[symbol] if self.types else 0)
                for node, (_, pointers, _) in enumerate(synsets.values())
                for symbol, offset, part in pointers
            }
        except KeyError as error:
            raise ValueError(f"dataset=wordnet: a pointer has {error}, which is unknown. Fix: dataset.path.") from None
        src, dst, types = torch.tensor(sorted(edges), dtype=torch.int64).reshape(-1, 3).unbind(1)
        raw = RawGraph(
            name=self.name,
            x=torch.from_numpy(_features([gloss for *_, gloss in synsets.values()], self.num_features)),
            y=torch.tensor([number for number, *_ in synsets.values()]),
            edge_index=torch.stack([src, dst]),
            edges=EdgeData(type=types) if self.types else EdgeData(),
            task="single_label",
            num_classes=NUM_CLASSES,
            num_edge_types=len(POINTERS) if self.types else None,
        )
        return prepare(raw, self, seed=seed)


def _read(config: WordNet, data_dir: Path | None) -> dict[tuple[str, str], Synset]:
    """Return synsets by part of speech and offset. Raises ValueError for files that are missing or malformed."""
    places = [] if data_dir is None else [expanded(data_dir) / (config.path or "wordnet")]
    places = [*places, INSTALLED] if config.path is None else [expanded(config.path), *places]
    folder = next((each for each in places if all((each / file).is_file() for file in FILES.values())), None)
    if folder is None:
        raise ValueError(
            f"dataset=wordnet: {', '.join(FILES.values())} not found in {' nor '.join(map(str, places))}. Fix: apt "
            "install wordnet-base, or dataset.path=FOLDER."
        )
    synsets: dict[tuple[str, str], Synset] = {}
    for part, file in FILES.items():
        with (folder / file).open(encoding="latin-1") as lines:
            for number, line in enumerate(lines, 1):
                if line.startswith("  "):  # the licence
                    continue
                try:
                    synsets[part, line.split()[0]] = _synset(line)
                except (ValueError, IndexError):
                    why = f"{folder / file}: line {number} is not of the format wndb(5WN)"
                    raise ValueError(f"dataset=wordnet: {why}. Fix: dataset.path.") from None
    return synsets


def _synset(line: str) -> Synset:
    """Return the synset of a line. Raises ValueError and IndexError.

    offset lexicographer type words(hex) {word id} pointers {symbol offset type source/target} frames of verbs | gloss
    """
    data, _, gloss = line.partition(" | ")
    _, lexicographer, _, words, *rest = data.split()
    found = rest[2 * int(words, 16) :]
    pointers = [found[i : i + 3] for i in range(1, 4 * int(found[0]), 4)]
    if not 0 <= int(lexicographer) < NUM_CLASSES:
        raise ValueError
    return int(lexicographer), [(symbol, to, "a" if part == "s" else part) for symbol, to, part in pointers], gloss


def _features(glosses: list[str], width: int) -> np.ndarray:
    """Return a 0/1 matrix of glosses and commonest words, [N, width] float32; ties go to the first by name."""
    texts = [set(re.findall(r"[a-z]+", gloss.lower())) for gloss in glosses]
    counts = Counter(word for text in texts for word in text)
    words = sorted(counts, key=lambda word: (-counts[word], word))
    column = {word: i for i, word in enumerate(words[:width])}
    x = np.zeros((len(texts), width), dtype=np.float32)
    for row, text in zip(x, texts, strict=True):
        row[[column[word] for word in text if word in column]] = 1
    return x
