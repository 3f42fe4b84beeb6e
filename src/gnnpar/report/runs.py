"""Read result.json of run folders, and name the settings in which runs differ."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from gnnpar.config.jobs import unread
from gnnpar.files import JsonObject, read_json
from gnnpar.settings import ConfigError
from gnnpar.targets import classes_in, is_own
from gnnpar.track.text import printable_tree
from gnnpar.training.result.result import CHANGES_TIMES, fault

Result = JsonObject
Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)
FILE = "result.json"


def collect(folders: Sequence[Path]) -> list[tuple[Path, Result]]:
    """Return (folder, result.json) of every run below the folders, each once, in the order of their paths."""
    files: dict[Path, Path] = {}
    for folder in folders:
        if not folder.is_dir():
            raise ConfigError(f"{folder} is no folder; give the folder of a run or of a sweep")
        for file in sorted(folder.rglob(FILE), key=_natural):
            files.setdefault(file.resolve(), file)
    if not files:
        raise ConfigError(f"no result.json below {', '.join(map(str, folders))}; give folders that runs have left")
    return [(file.parent, _read(file)) for file in files.values()]


def folders_of(pattern: str | os.PathLike[str]) -> list[Path]:
    """Return the folders that a path or glob pattern names. An existing folder of exactly that name comes first."""
    plain = os.path.expanduser(pattern)
    names = [plain] if os.path.isdir(plain) else glob.glob(plain, recursive=True)
    folders = sorted({Path(name) for name in names if os.path.isdir(name)}, key=_natural)
    if not folders:
        raise ConfigError(f"{pattern} names no folder; give the folder of a run or of a sweep, or a pattern of them")
    return folders


def _read(file: Path) -> Result:
    try:
        result = read_json(file)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is no JSON ({error}); remove it or run again") from error
    if not isinstance(result, dict) or result.get("schema", 1) != 1:
        raise ConfigError(f"{file} is of another schema than 1; compare it with the gnnpar that wrote it")
    if wrong := fault(result):
        raise ConfigError(f"{file} is no result of a run: {wrong}; remove it or run again")
    return printable_tree(result)


def by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return key -> items, both in their order."""
    found: dict[Key, list[Item]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return found


def _natural(file: Path) -> list[tuple[int, int, str]]:
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in file.parts]


def value_at(result: Result, path: Sequence[str]) -> Any:  # Any: as the schema says
    """Return the value at a path of nested keys, or None."""
    value: object = result
    for name in path:
        value = value.get(name) if isinstance(value, Mapping) else None
    return value


def flat(settings: JsonObject, prefix: str = "") -> dict[str, str]:
    """Return nested settings by dotted key; a nested object by the name of its class."""
    texts: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            texts |= flat(value, f"{prefix}{key}.")
        elif key == "_target_":
            texts[prefix.rstrip(".") or key] = str(value).rpartition(".")[2].lower()
        else:
            texts[f"{prefix}{key}"] = str(value)
    return texts


def own_settings(result: Result) -> dict[str, str]:
    """Return the settings of a configuration, without seed, block and settings that its strategy does not read."""
    settings = result.get("settings", {})
    left_out = {"seed", "block", *unread(settings)}
    return flat({key: value for key, value in settings.items() if key not in left_out})


def model_of(result: Result) -> str:
    """Return the name of the model, with the class of a PyG model."""
    target = value_at(result, ("settings", "model", "target"))
    return f"{result['model']} {target.rpartition('.')[2]}" if isinstance(target, str) else result["model"]


def dataset_of(result: Result) -> str:
    """Return the name of the dataset; for a file, dataset.name."""
    name, path = (value_at(result, ("settings", "dataset", key)) for key in ("name", "path"))
    return name if isinstance(name, str) and path is not None else result["dataset"]


def title(result: Result) -> str:
    """Return strategy/model."""
    return f"{result['strategy']}/{model_of(result)}"


_BUSY = 1.5  # load per core; runs of one sweep stay below it


def is_busy(result: Result) -> bool:
    """Return True if other programs used cores that the run needed when it began."""
    load = result.get("load") or {}
    return "others" in load or load.get("before", 0.0) > _BUSY * result["cores"]


def resumed_from(result: Result) -> tuple[int, tuple[str, ...]] | None:
    """Return the number of epochs that a resumed run trained with other settings, and these settings if they affect
    numbers; else None."""
    if not isinstance(found := result.get("begun_otherwise"), Mapping):
        return None
    deciding = tuple(each for each in found.get("settings", ()) if each not in CHANGES_TIMES)
    return (found.get("epochs", 0), deciding) if deciding else None


def configuration_of(result: Result) -> Hashable:
    """Return a key that is equal in all runs of a configuration, which differ in seed and block only."""
    named = ("strategy", "model", "dataset", "world_size", "threads_per_rank", "provenance", "oversubscribed", "epochs")
    settings = sorted(own_settings(result).items())
    where = *result["exactness"], result["hardware"], links(result)
    return (*(result[name] for name in named), *where, resumed_from(result), *settings)


def distinguishing_settings(results: Sequence[Result]) -> list[tuple[str, str]]:
    """Return for each run, as KEY=VALUE, the settings of its strategy that differ between runs of the strategy, and the
    other settings that differ between its runs with one model and dataset."""
    of_strategy = [flat(value_at(r, ("settings", "strategy")) or {}) for r in results]
    idle: dict[str, set[str]] = {}  # strategy -> settings that have a column, or that it does not read
    for r in results:
        shown = {"strategy", "world_size", "threads_per_rank"}
        idle.setdefault(r["strategy"], shown).update(unread(r.get("settings", {})))
    others = [{k: v for k, v in own_settings(r).items() if k.split(".")[0] not in idle[r["strategy"]]} for r in results]
    places = [(r["strategy"], model_of(r), dataset_of(r)) for r in results]
    variants = _differing([r["strategy"] for r in results], of_strategy)
    return list(zip(variants, _differing(places, others), strict=True))


def _differing(places: Sequence[Hashable], flats: Sequence[Mapping[str, str]]) -> list[str]:
    """Return for each item the settings that differ between items with the same place."""
    items = list(zip(places, flats, strict=True))
    same = by(items, lambda item: item[0])
    keys = {place: differing_keys([settings for _, settings in of]) for place, of in same.items()}
    return [" ".join(f"{key}={settings[key]}" for key in keys[place] if key in settings) for place, settings in items]


def differing_keys(flats: Sequence[Mapping[str, str]]) -> list[str]:
    """Return the keys with several values."""
    keys = dict.fromkeys(key for settings in flats for key in settings)
    return [key for key in keys if len({settings.get(key) for settings in flats}) > 1]


def is_control(result: Result) -> bool:
    """Return True for the negative control, which drops all rows over cut edges in training."""
    codec = value_at(result, ("settings", "strategy", "codec", "_target_"))
    return "dropped" in result["exactness"] or str(codec).endswith(".Drop")


def is_exact(result: Result) -> bool:
    return list(result["exactness"]) == ["exact"]


def exactness_of(result: Result) -> str:
    """Return the classes of exactness, marked if no check has verified the run as exact. Runs without `verified` count
    as checked if model and strategy are gnnpar's own."""
    groups = {name: value_at(result, ("settings", name)) for name in ("model", "strategy")}
    known = result.get("verified", "checked" if all(map(is_own, classes_in(groups))) else "no") != "no"
    return " ".join(result["exactness"]) + (" (not checked)" if is_exact(result) and not known else "")


def no_speed(row: JsonObject) -> bool:
    """Return True for more threads than cores, or ranks as threads: times do not measure speed (rule 6)."""
    return bool(row["oversubscribed"]) or row["provenance"] == "emulated"


def times_of(row: JsonObject) -> str:
    """Return provenance and links of a row."""
    return f"{row['provenance']} {row['links']}".strip()


def links(result: Result) -> str:
    """Return '2 x 1 Gbit/s' for launch=paced, '2 x by topology' if links differ, else ''."""
    paced = result.get("paced")
    if not paced:
        return ""
    rate, by_link = paced["rates"]["host_gbps"], paced["rates"]["link_gbps"]
    return f"{paced['hosts']} x " + ("by topology" if by_link or isinstance(rate, list) else f"{rate:g} Gbit/s")
