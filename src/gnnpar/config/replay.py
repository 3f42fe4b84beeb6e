"""`gnnpar train --resume FOLDER`: the command line that sweep.json holds.

It comes from a file: it may choose what gnnpar and installed plugins bring, and nothing that runs other code
(docs/adr/0034).
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import cast

from gnnpar.config.compose import chosen_files
from gnnpar.config.errors import OF_HYDRA
from gnnpar.config.groups import KEYS, is_group
from gnnpar.config.jobs import MANIFEST, Manifest
from gnnpar.config.study import MOST_RUNS, key_of
from gnnpar.durable import JsonDict, refuse_link
from gnnpar.paths import conf_dir, installed_confs, is_brought_group
from gnnpar.settings import WRITTEN_FOLDERS, ConfigError, show
from gnnpar.targets import TRUST, is_word, let_in, refuse_foreign

FLAGS = ("-m", "--multirun")
_LAUNCHER = "n_jobs pre_dispatch batch_size timeout_min nodes tasks_per_node cpus_per_task gpus_per_node mem_gb"
_SLURM = "partition qos account constraint gres array_parallelism cpus_per_gpu gpus_per_task mem_per_gpu mem_per_cpu"
_SWEEPER = "n_trials direction n_jobs max_batch_size max_failure_rate sampler.seed"
_HYDRA_KEYS = {f"hydra.launcher.{key}" for key in f"{_LAUNCHER} {_SLURM}".split()} | {
    f"hydra.sweeper.{key}" for key in _SWEEPER.split()
}
"""Of launchers and sweepers. Others may be commands, as a prolog of Slurm's, or files of the folder."""
_LONGEST = 10_000
_MOST_LETTERS = 20_000  # of all overrides of a job
"""Letters of an override: its parser takes minutes for longer ones."""
_MOST = {".n_jobs": 64, ".tasks_per_node": 64, ".nodes": 64, ".gpus_per_node": 64, ".n_trials": MOST_RUNS}
_MOST_OF_OTHERS = 10_000_000
"""Of the processes of a launcher on one machine, which starts all of them, however few jobs there are; of GPUs, whose
numbers it writes out; of jobs; of what else has a number."""
PARAMS = "hydra.sweeper.params."
_JOB_NUMBER = re.compile(r"\$\{hydra[.:]job\.num\}")
_PLAIN = re.compile(r"[\w.,:+()-]*")
"""A value that is numbers, names or ranges."""
_KEY = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*")
_WITHOUT_FOLDER = "hydra.searchpath=[]"
"""Hydra then finds no YAML of the working directory."""
_CHOICES = re.compile(r"(?:choice\(|\[)?([\w,\s-]*)[)\]]?")


@dataclass(frozen=True)
class Replay:
    """A sweep that is resumed. `typed`: what stands on the command line beside --resume FOLDER. `again`: folders of
    its jobs that run once more, though they are done."""

    file: Path
    typed: tuple[str, ...]
    again: frozenset[str] = frozenset()

    def check_settings(self, config: Mapping[str, object], overrides: Sequence[str] = ()) -> None:
        """Refuse a job with classes that neither gnnpar, nor a plugin, nor what was typed names: a class itself, or
        those that a group's YAML, chosen by its name, says; and with arguments of these that were not typed.

        `config`: what the job's `overrides` resolve to.
        """
        with suppress(ValueError):
            return refuse_foreign(config, str(self.file), remedy=self.remedy)
        own = {key_of(override).removeprefix(PARAMS) for override in self.typed}
        typed = [override for override in overrides if key_of(override) in own]
        named = laid_over(chosen_files(typed), typed_values(typed))
        try:
            refuse_foreign(config, str(self.file), remedy=self.remedy, named=named)
        except ValueError as error:
            raise ConfigError(str(error)) from error
        let_in(named, checked=True)

    def check_choices(self, choices: Mapping[str, object], overrides: Sequence[str]) -> None:
        """Refuse a job, however its sweeper came to it, with an override that could bring code, or with YAML of the
        working directory, of which nothing was typed.

        `choices`: group -> the file or files that Hydra chose in it.
        """
        own = {key_of(override).removeprefix(PARAMS) for override in self.typed}
        self.check_overrides([override for override in overrides if key_of(override) not in own])
        for group, chosen in choices.items():
            if group in own or group.startswith("hydra/") or chosen is None or os.environ.get(TRUST) == "1":
                continue
            for option in [chosen] if isinstance(chosen, str) else cast("Sequence[object]", chosen):
                if not _is_brought(group.partition("@")[0], str(option)):
                    raise ConfigError(f"{self.file} chooses {group}={show(option)} of this folder: {self.remedy}")

    def check_overrides(self, overrides: Sequence[str]) -> None:
        """Refuse overrides of the file that could bring code, or more of them than Hydra reads in some seconds."""
        if (letters := sum(map(len, overrides))) > _MOST_LETTERS and os.environ.get(TRUST) != "1":
            raise ConfigError(f"{self.file} has overrides of {letters:,} letters, more than {_MOST_LETTERS:,}")
        for override in overrides:
            self.check_override(override)

    def check_override(self, override: str) -> None:
        """Refuse an override of the file that could bring code."""
        if os.environ.get(TRUST) != "1" and not _is_harmless(override):
            raise ConfigError(
                f"{self.file} has {show(override)}, which may run code of its own, read the environment or write "
                f"elsewhere: {self.remedy}"
            )

    def refuse_paths_of_dataset(self, overrides: Sequence[str]) -> None:
        """Refuse what the file says of where a dataset that was typed lies, and else of it, but for numbers and words:
        it may be a path."""
        for override in overrides:
            key = key_of(override).removeprefix(PARAMS)
            values = override.partition("=")[2].split(",")
            of_path = key in ("data_dir", "dataset.path")
            if of_path or (key.startswith("dataset.") and not all(map(is_word, values))):
                raise ConfigError(f"{self.file} has {show(override)} beside the dataset that was typed: {self.remedy}")

    @property
    def remedy(self) -> str:
        return f"type it again beside --resume {self.file.parent}, or --trust, which runs it"


def resumed(argv: Sequence[str]) -> tuple[list[str], Replay | None]:
    """`--resume FOLDER` as the overrides of the sweep in FOLDER, and what is typed beside it, which comes before."""
    if "--resume" not in argv:
        if "--again" in argv:
            raise ConfigError("--again names jobs of a sweep: gnnpar train --resume FOLDER --again JOBS")
        return list(argv), None
    at = argv.index("--resume")
    if at + 1 == len(argv):
        raise ConfigError("--resume needs the folder of a sweep: gnnpar train --resume multirun/DATE/TIME")
    folder = Path(argv[at + 1])
    if "${" in str(folder):
        raise ConfigError(
            f"--resume {folder}: Hydra would read ${{ as a value of its own; give the folder another name"
        )
    refuse_link(folder / MANIFEST)  # what it leads to would be left in the folder
    manifest = Manifest.read(folder)
    if not manifest.jobs:
        raise ConfigError(f"{folder} has no sweep.json with jobs; give the folder of a sweep (gnnpar train -m ...)")
    beside, again = _again([*argv[:at], *argv[at + 2 :]], manifest)
    typed = [a for a in beside if a not in FLAGS]
    own = {key_of(override).removeprefix(PARAMS) for override in typed}
    stored = [override for override in manifest.argv if key_of(override).removeprefix(PARAMS) not in own]
    replay = Replay(folder / MANIFEST, tuple(typed), again)
    replay.check_overrides(stored)
    if "dataset" in own:
        replay.refuse_paths_of_dataset(stored)
    fenced = [] if os.environ.get(TRUST) == "1" or any(map(_names_yaml, typed)) else [_WITHOUT_FOLDER]
    return ["-m", *stored, *typed, *fenced, f"hydra.sweep.dir={quoted(str(folder))}"], replay


def _again(argv: Sequence[str], manifest: Manifest) -> tuple[list[str], frozenset[str]]:
    """`--again JOBS` taken out: names of job folders with commas between them. A job that runs again starts afresh."""
    if "--again" not in argv:
        return list(argv), frozenset()
    at = argv.index("--again")
    known = {job.folder for job in manifest.jobs.values()}
    names = frozenset(filter(None, argv[at + 1].split(","))) if at + 1 < len(argv) else frozenset()
    if not names or names - known:
        wrong = f"{min(names - known)} is no job of {manifest.folder}" if names else "--again needs folders of jobs"
        raise ConfigError(f"{wrong}; name some of {', '.join(sorted(known)[:8])}, with commas between them")
    if "--again" in (rest := [*argv[:at], *argv[at + 2 :]]):
        raise ConfigError("--again stands twice; name all jobs behind one, with commas between them")
    return rest, names


def asked(argv: Sequence[str]) -> list[str]:
    """What sweep.json keeps of a command line: all but the sweep's folder and the flag."""
    return [a for a in argv if a not in (*FLAGS, _WITHOUT_FOLDER) and not a.startswith("hydra.sweep.dir=")]


def quoted(text: str) -> str:
    """A literal in Hydra's grammar of overrides, where backslashes mean themselves but in front of a quote."""
    return "'" + re.sub(r"(\\*)('|\Z)", lambda end: 2 * end[1] + ("\\'" if end[2] else ""), text) + "'"


def as_value(text: str) -> str:
    """A path as a value of an override, quoted where Hydra would read something else than that text."""
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*|[\w./-]*/[\w./-]*", text, re.ASCII)
    return text if plain and text.lower() not in ("null", "true", "false", "nan", "inf") else quoted(text)


def _is_harmless(override: str) -> bool:
    """Whether an override can choose only YAML of gnnpar and of plugins, sets plain values, and no folder to write
    to."""
    key, _, value = override.partition("=")
    group = key.lstrip("+~").partition("@")[0]
    if len(override) > _LONGEST or override.startswith("-") or "_target_" in override or "custom_search_space" in key:
        return False
    if override.startswith("~") and "=" not in override:
        return is_brought_group(group)
    numbered = _JOB_NUMBER.sub("", value) if group.startswith("hydra.sweep.") else value  # elsewhere it hides a name
    if "{" in numbered:  # a dictionary, whose keys are not looked at
        return False
    if "$" in key + numbered:  # reads the environment: secrets, and folders elsewhere; \{ becomes { when it is parsed
        return False
    if (re.split(r"[./]", group)[-1] in WRITTEN_FOLDERS or group == "tracker.entity") and value != "null":
        return False
    if group == "resume" and value not in ("null", "auto"):  # whose state and rows would be left in the sweep's folder
        return False
    if _is_group(group):
        options = _CHOICES.fullmatch(value)
        at_hydra = "hydra" in key.partition("@")[2]
        return not at_hydra and bool(options) and all(_is_brought(group, o.strip()) for o in options[1].split(","))
    if group.startswith(PARAMS):  # a sweeper makes overrides of jobs of them
        return _is_harmless(override.replace(PARAMS, "", 1))
    if "hydra" in key:
        most = next((most for end, most in _MOST.items() if group.endswith(end)), None)
        few = (most is None and not value.isdecimal()) or (
            value.isdecimal() and len(value) <= 9 and int(value) <= (most or _MOST_OF_OTHERS)
        )
        return not key.startswith("+") and (
            group == "hydra.sweep.subdir" or (group in _HYDRA_KEYS and _is_plain(value) and few)
        )
    return _KEY.fullmatch(group) is not None and group.partition(".")[0] in KEYS and "@" not in key


def typed_values(overrides: Sequence[str]) -> JsonDict:
    """What overrides set, as a tree; not what they choose."""
    from hydra.core.override_parser.overrides_parser import OverridesParser

    tree: JsonDict = {}
    for override in OverridesParser.create().parse_overrides(list(overrides)):
        key = override.get_key_element()
        if override.is_sweep_override() or override.is_delete() or "@" in key or is_group(key.lstrip("+")):
            continue
        *path, last = key.lstrip("+").split(".")
        node = tree
        for name in path:
            node = node.setdefault(name, {})
            if not isinstance(node, dict):
                break
        else:
            node[last] = override.value()
    return tree


def laid_over(tree: object, over: object) -> object:
    """A configuration with what another one says of it."""
    if isinstance(tree, Mapping) and isinstance(over, Mapping):
        return {**tree, **{key: laid_over(tree.get(key), value) for key, value in over.items()}}
    return over


def _names_yaml(override: str) -> bool:
    """Whether it chooses YAML that gnnpar and plugins have not."""
    group = key_of(override).partition("@")[0]
    return _is_group(group) and not _is_harmless(override)


def _is_plain(value: str) -> bool:
    return _PLAIN.fullmatch(value) is not None


def _is_group(name: str) -> bool:
    return name in OF_HYDRA or is_group(name)


def _is_brought(group: str, option: str) -> bool:
    """Whether the YAML that Hydra finds is gnnpar's, a plugin's or its own, and not of the working directory."""
    file = Path(group, f"{option}.yaml")
    if not option:  # Hydra reads a file without a name
        return False
    try:
        if (conf_dir() / file).exists():
            return True
        brought = option in OF_HYDRA.get(group, ()) or any((folder / file).exists() for folder in installed_confs())
        return brought and not file.exists()  # Hydra looks into the working directory before plugins
    except OSError:  # a name that is too long
        return False
