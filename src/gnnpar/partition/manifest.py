"""manifest.json of a folder of shards: the graph, its partition, and every file with its checksum. Reading does not
import torch. Every error is a ValueError with the name of the folder."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from annotated_types import Ge

from gnnpar.files import JsonDict, checksum, file_hash, read_checked_json, write_checked_json

if TYPE_CHECKING:
    from gnnpar.folds.edge_data import EdgeSizes

NAME, SCHEMA = "manifest.json", 1
PARTITION = "part_of.npy"
Check = Literal["full", "header"]


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """A .npy file: its array, its size and the sha256 of its bytes."""

    shape: tuple[Annotated[int, Ge(0)], ...]
    dtype: str
    nbytes: Annotated[int, Ge(0)]
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """Facts of the whole graph, of its partition, and of every file (name relative to the folder).

    setup: the configuration that made it (names, dataset, partition). edge_ids: whether blocks have global edge ids.
    edge_types: number of edge types; edge_attr: width of attributes; 0: none. node_types: JSON of the `Schema` of a
    HeteroData, or empty. rounded: as in Dataset.
    """

    schema: int
    made_by: str
    name: str
    task: Literal["single_label", "binary", "multi_label", "regression"]
    num_nodes: Annotated[int, Ge(1)]
    num_edges: Annotated[int, Ge(0)]
    num_features: Annotated[int, Ge(1)]
    num_classes: Annotated[int, Ge(1)]
    num_train: Annotated[int, Ge(1)]
    parts: Annotated[int, Ge(1)]
    edge_ids: bool
    edge_types: Annotated[int, Ge(0)] = 0
    edge_attr: Annotated[int, Ge(0)] = 0
    node_types: str = ""
    rounded: bool = False
    hashes: dict[str, str]
    statistics: JsonDict
    setup: dict[str, JsonDict]
    files: dict[str, FileFacts]

    @property
    def edge_sizes(self) -> EdgeSizes:
        """Sizes as in Dataset.edge_sizes, without degrees."""
        from gnnpar.folds.edge_data import EdgeSizes, Schema  # imports torch

        found = Schema.of(self.node_types) if self.node_types else None
        return EdgeSizes(self.edge_types, self.edge_attr, schema=found)

    @property
    def fingerprint(self) -> str:
        """Hash that is equal for equal shards."""
        return checksum(asdict(self))

    def of_part(self, part: int) -> dict[str, FileFacts]:
        """Return the files of one rank by their names in its folder."""
        prefix = f"{folder_of(part)}/"
        return {name.removeprefix(prefix): facts for name, facts in self.files.items() if name.startswith(prefix)}

    def save(self, folder: Path) -> None:
        write_checked_json(folder / NAME, asdict(self))


def folder_of(part: int) -> str:
    """Return the name of a rank's folder."""
    return f"part-{part}"


@contextmanager
def clear(folder: Path) -> Iterator[None]:
    """Raise any error within the context as a ValueError with the name of the folder."""
    try:
        yield
    except Exception as error:  # pydantic, numpy and torch raise errors of all kinds
        if type(error) is ValueError and str(error).startswith("shards="):
            raise
        what = (
            " ".join(((isinstance(error, OSError) and error.strerror) or str(error)).split())[:200]
            or type(error).__name__
        )
        raise ValueError(
            f"shards={folder} cannot be read: {what}; give a folder that `gnnpar partition` has made, or make it again"
        ) from error


def read_manifest(folder: Path) -> Manifest:
    """Return the manifest of a folder of shards, checked without reading other files."""
    if not (folder / NAME).is_file():
        raise ValueError(
            f"shards={folder} holds no {NAME}: give a folder that `gnnpar partition dataset=... out={folder}` has made"
        )
    from pydantic import TypeAdapter, ValidationError

    with clear(folder):
        data = read_checked_json(folder / NAME)
        if data.get("schema") != SCHEMA:
            raise ValueError(
                f"shards={folder} are of schema {str(data.get('schema'))[:20]}, this gnnpar reads {SCHEMA}: "
                "partition again"
            )
        try:
            manifest = TypeAdapter(Manifest).validate_json(json.dumps(data), strict=True)
        except ValidationError as error:
            first = error.errors()[0]
            place = ".".join(str(each) for each in first["loc"])[:80]
            raise ValueError(f"{place or 'the manifest'}: {first['msg']}") from None
        for problem in _problems(manifest):
            raise ValueError(problem)
        return manifest


def _problems(manifest: Manifest) -> Iterator[str]:
    for name in {"graph", "split", "partition"} - manifest.hashes.keys():
        yield f"hashes lack {name}"
    for name, value in manifest.hashes.items():
        if re.fullmatch("[0-9a-f]*", value) is None:  # files are named by them
            yield f"hashes.{name}={value[:80]!r} is no hash"
    if manifest.parts > manifest.num_nodes or manifest.num_train > manifest.num_nodes:
        yield f"parts={manifest.parts} and num_train={manifest.num_train} of num_nodes={manifest.num_nodes}"
    if manifest.statistics.get("parts") != manifest.parts:
        yield f"statistics are of {manifest.statistics.get('parts')} parts, there are {manifest.parts}"
    for name in manifest.files:
        if name.startswith("/") or ".." in Path(name).parts:
            yield f"{name!r} lies outside the folder"
    ids = [sum(facts.shape) for name, facts in manifest.files.items() if name.endswith("/node_ids.npy")]
    if (len(ids), sum(ids)) != (manifest.parts, manifest.num_nodes):
        yield f"its {manifest.parts} parts list files of {sum(ids)} nodes, num_nodes={manifest.num_nodes}"


def verify(folder: Path, name: str, facts: FileFacts, check: Check) -> None:
    """Raise ValueError for a missing file, or one of another size (header) or sha256 (full)."""
    file = folder / name
    again = "partition again, or copy it again from where it was made"
    try:
        size = file.stat().st_size
    except OSError as error:
        raise ValueError(f"shards={file} is missing ({error.strerror}); {again}") from None
    if size != facts.nbytes:
        raise ValueError(f"shards={file} is {size} bytes, not {facts.nbytes}; {again}")
    if check == "full" and file_hash(file) != facts.sha256:
        raise ValueError(f"shards={file} is corrupt (its sha256 is another one); {again}")
