"""`gnnpar new strategy|model|codec NAME`: write a small working one, with YAML and test."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
from argparse import ArgumentParser
from dataclasses import dataclass
from pathlib import Path
from string import Template

from gnnpar.files import write_text_atomic
from gnnpar.paths import checkout_dir, conf_dir, expanded
from gnnpar.settings import ConfigError, config_errors
from gnnpar.track.console import say

KINDS = {"strategy": "parallel", "model": "models", "codec": "codecs"}
"""Configuration group -> its package. A strategy is a folder in it, the others are modules."""
TESTS = {"strategy": "conformance", "model": "models", "codec": "codecs"}
HELP = """Writes a small working strategy, model or codec, its YAML and its test. In the repository of gnnpar they go
where the others are; in any other folder they are yours: gnnpar finds them when it is called from there."""


@dataclass(frozen=True, kw_only=True)
class Places:
    """Places of the files, and the module's name for imports. package: the `__init__.py` of a method's folder."""

    package: Path | None
    module: Path
    config: Path
    test: Path
    imported: str


def run(argv: list[str]) -> int:
    parser = ArgumentParser("gnnpar new", description=HELP)
    parser.add_argument("kind", choices=list(KINDS), help="what it is")
    parser.add_argument("name", help="its name: strategy=NAME chooses it")
    parser.add_argument("--into", type=Path, default=Path(), metavar="FOLDER", help="where; this folder")
    options = parser.parse_args(argv)
    with config_errors():
        folder = expanded(options.into).absolute()
    for file in write(options.kind, options.name, folder):
        say(f"wrote {file.relative_to(folder)}")
    say("")
    for line in next_steps(options.kind, options.name, folder):
        say(line)
    return 0


def write(kind: str, name: str, folder: Path) -> list[Path]:
    """Write the module, its YAML and its test. Raise ConfigError for an existing file or a bad name."""
    if not re.fullmatch(r"[a-z][a-z0-9_]*", name):
        raise ConfigError(f"{name} cannot name a {kind}; use lower-case letters, digits and _, a letter first")
    if keyword.iskeyword(name) or keyword.iskeyword(class_name(name)):
        raise ConfigError(f"{name} is a word of Python; choose another name")
    places = places_of(kind, name, folder)
    files = [places.module, places.config, places.test]
    package = [] if places.package is None else [places.package]
    if there := [file for file in files + package if os.path.lexists(file)]:
        raise ConfigError(f"{there[0]} is there already; choose another name, or remove it")
    if (conf_dir() / kind / f"{name}.yaml").exists():
        raise ConfigError(f"{kind}={name} is in gnnpar already; choose another name")
    spec = importlib.util.find_spec(name) if places.imported == name else None
    if spec is not None and spec.origin is not None:  # a namespace package does not hide the module
        raise ConfigError(f"the Python module {name} would be imported instead of {name}.py; choose another name")
    words = {"name": name, "Class": class_name(name), "module": places.imported}
    words["target"] = f"{places.imported}.{words['Class']}"
    texts = [rendered(kind, part, words) for part in ("module", "config", "test")]
    notes = [f'"""{words["Class"]}, a method of its own."""\n' for _ in package]
    for file, text in zip(files + package, texts + notes, strict=True):
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, text)
    return files


def places_of(kind: str, name: str, folder: Path) -> Places:
    """Return the places in the repository, or in another folder where Hydra and Python find them."""
    root = checkout_dir()
    if root is not None and folder.resolve() == root.resolve():
        package = folder / "src" / "gnnpar" / KINDS[kind]
        method = kind == "strategy"
        return Places(
            package=package / name / "__init__.py" if method else None,
            module=package / name / "strategy.py" if method else package / f"{name}.py",
            config=folder / "conf" / kind / f"{name}.yaml",
            test=folder / "tests" / TESTS[kind] / f"test_{name}.py",
            imported=f"gnnpar.{KINDS[kind]}.{name}" + (".strategy" if method else ""),
        )
    return Places(
        package=None,
        module=folder / f"{name}.py",
        config=folder / kind / f"{name}.yaml",
        test=folder / f"test_{name}.py",
        imported=name,
    )


def class_name(name: str) -> str:
    """Convert my_strategy to MyStrategy."""
    return "".join(word.capitalize() for word in name.split("_"))


def rendered(kind: str, part: str, words: dict[str, str]) -> str:
    template = Path(__file__).parents[1] / "templates" / kind / f"{part}.txt"
    text = Template(template.read_text(encoding="utf-8")).substitute(words)

    def in_order(imports: re.Match[str]) -> str:
        return "".join(sorted(imports[0].splitlines(keepends=True), key=lambda line: line.split()[1]))

    return re.sub(r"(?:^from \S+ import .*\n)+", in_order, text, flags=re.MULTILINE)


def next_steps(kind: str, name: str, folder: Path) -> list[str]:
    """Return the commands that test and use the new files."""
    places = places_of(kind, name, folder)
    steps = [] if folder == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
    steps.append(f"gnnpar check {kind}={name}")
    steps.append(f"python -m pytest {places.test.relative_to(folder)}")
    if places.imported != name and kind != "codec":
        steps.append(f"python tests/golden/make.py{f' {name}' if kind == 'strategy' else ''}  # records its losses")
    if places.package is not None:
        steps.append(f"add gnnpar.parallel.{name} to the contract of independent methods in pyproject.toml")
    steps.append(f"gnnpar train {kind}={name} debug=tiny")
    return ["next:", *(f"  {step}" for step in steps)]
