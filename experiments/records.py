"""Raw lines of studies: one JSON object a line, appended while a study runs, committed compressed.

    python experiments/records.py pack            # what studies have appended, before it is committed
    python experiments/records.py pack FILE ...   # of these files alone
    xzcat experiments/sar_speed/results.jsonl.*.xz

A study names its lines by one path, as `results.jsonl`. While it runs, they stand there as plain text, which git
ignores. `pack` compresses them into results.jsonl.1.xz, results.jsonl.2.xz and so on, each below the repository's limit
of a file, byte for byte the same lines, and removes the plain file. The plain file, where there is one, holds all
lines: appending to packed ones unpacks them first, so that a study goes on where it was.
"""

import itertools
import json
import lzma
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any  # of JSON

HERE = Path(__file__).parent
Row = Mapping[str, Any]
PART_BYTES = 1_000_000  # of plain lines in a part; at most 145 kB compressed, today
LIMIT_BYTES = 200_000  # of a tracked file
CHANGED = re.compile(rb'"commit": "[0-9a-f]+\+"')  # as runs write it that are not of a commit alone


@dataclass(frozen=True)
class Files:
    """The files of a study: raw lines by name, and the figure. smoke: use the files of a reduced run."""

    folder: Path
    figure: Path = Path("figure.svg")
    smoke: bool = False

    def __call__(self, name: str = "results") -> Path:
        return self.folder / f"{'smoke_' * self.smoke}{name}.jsonl"

    def read(self, name: str = "results") -> list[dict[str, Any]]:
        return read(self(name))


def read(file: Path) -> list[dict[str, Any]]:
    """All lines of a study, packed or not; none where there are no files."""
    return [json.loads(line) for line in _text(file).splitlines()]


def append(file: Path, rows: Iterable[Row]) -> None:
    """In one write: whatever ends the process, all of them or none; another study may write there, too."""
    if parts(file) and not file.exists():
        scratch = _write_scratch(file, _text(file))
        with suppress(FileExistsError):  # another study was first
            os.link(scratch, file)
        scratch.unlink()
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NONBLOCK  # a pipe that nobody reads is an error
    with open(os.open(file, flags, 0o666), "ab", buffering=0) as out:
        out.write(_encode(rows))


def replace(file: Path, rows: Iterable[Row]) -> None:
    """These lines in the place of all lines, at once."""
    _write_scratch(file, _encode(rows)).replace(file)


def pack(file: Path) -> None:
    """The plain file as compressed parts. It is removed last: until then it counts, and packing can be repeated.

    SystemExit where lines that are not packed yet are of a checkout with changes: nobody can run them again.
    """
    text = file.read_bytes()
    known = {line for part in parts(file) for line in lzma.decompress(part.read_bytes()).splitlines()}
    if changed := sum(bool(CHANGED.search(line)) for line in text.splitlines() if line not in known):
        raise SystemExit(f"{file}: {changed} new lines are of a checkout with changes; commit them and measure again")
    chunks = list(_cut(text.splitlines(keepends=True)))
    for number, chunk in enumerate(chunks, 1):
        part = _part(file, number)
        if part.exists() and lzma.decompress(part.read_bytes()) == chunk:
            continue  # the bytes that are committed, whichever version of liblzma made them
        packed = lzma.compress(chunk, preset=9 | lzma.PRESET_EXTREME)
        if len(packed) >= LIMIT_BYTES:
            raise SystemExit(f"{part} would have {len(packed)} bytes, the limit is {LIMIT_BYTES}: lower PART_BYTES")
        _write_scratch(part, packed).replace(part)
    for part in parts(file)[len(chunks) :]:
        part.unlink()
    if file.stat().st_size != len(text):
        raise SystemExit(f"{file}: lines were appended while it was packed; pack it again when the study has ended")
    file.unlink()


def parts(file: Path) -> list[Path]:
    """The compressed files of a study's lines, in their order."""
    return list(itertools.takewhile(Path.exists, (_part(file, number) for number in itertools.count(1))))


def _part(file: Path, number: int) -> Path:
    return file.with_name(f"{file.name}.{number}.xz")


def _text(file: Path) -> bytes:
    if file.exists():
        return file.read_bytes()
    return b"".join(map(_unpacked, parts(file)))


def _unpacked(part: Path) -> bytes:
    """ValueError where it holds more than `pack` puts into one."""
    packed = lzma.LZMADecompressor()
    text = packed.decompress(part.read_bytes(), max_length=4 * PART_BYTES)
    if not packed.eof:
        raise ValueError(f"{part} holds more than {4 * PART_BYTES} bytes, or is cut off")
    return text


def _encode(rows: Iterable[Row]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def _cut(lines: Iterable[bytes]) -> Iterator[bytes]:
    """As many lines a part as fit: parts before the last stay as they are when lines are appended."""
    chunk = b""
    for line in lines:
        if chunk and len(chunk) + len(line) > PART_BYTES:
            yield chunk
            chunk = b""
        chunk += line
    if chunk:
        yield chunk


def _write_scratch(file: Path, content: bytes) -> Path:
    scratch = file.with_name(f"{file.name}.{os.getpid()}.part")
    scratch.write_bytes(content)
    return scratch


def main(words: Sequence[str]) -> None:
    if words[:1] != ["pack"]:
        raise SystemExit(__doc__)
    plain = [file for file in sorted(HERE.glob("*/*.jsonl")) if not file.name.startswith(("smoke_", "quick_"))]
    for file in map(Path, words[1:]) if words[1:] else plain:
        if not file.exists():
            raise SystemExit(f"there is no {file}: nothing was appended since it was packed")
        pack(file)
        print(f"{file} -> {len(parts(file))} parts, {sum(part.stat().st_size for part in parts(file))} bytes")


if __name__ == "__main__":
    main(sys.argv[1:])
