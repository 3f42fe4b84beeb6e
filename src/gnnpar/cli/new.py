"""`gnnpar new strategy|model|codec NAME`: write a small working one, with YAML and test."""

from __future__ import annotations

import importlib.util
import keyword
import os
import re
import shlex
from argparse import ArgumentParser
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
    files, imported = places_of(kind, name, folder)
    if there := [file for file in files.values() if os.path.lexists(file)]:
        raise ConfigError(f"{there[0]} is there already; choose another name, or remove it")
    if (conf_dir() / kind / f"{name}.yaml").exists():
        raise ConfigError(f"{kind}={name} is in gnnpar already; choose another name")
    spec = importlib.util.find_spec(name) if imported == name else None
    if spec is not None and spec.origin is not None:  # a namespace package does not hide the module
        raise ConfigError(f"the Python module {name} would be imported instead of {name}.py; choose another name")
    words = {"name": name, "Class": class_name(name), "module": imported}
    words["target"] = f"{imported}.{words['Class']}"
    texts = {part: rendered(kind, part, words) for part in files if part != "package"}
    texts["package"] = f'"""{words["Class"]}, a method of its own."""\n'
    for part, file in files.items():
        file.parent.mkdir(parents=True, exist_ok=True)
        write_text_atomic(file, texts[part])
    return [files[part] for part in ("module", "config", "test")]


def places_of(kind: str, name: str, folder: Path) -> tuple[dict[str, Path], str]:
    """Return part -> its file, and the module's name for imports: in the repository, or in another folder where Hydra
    and Python find them. package: the `__init__.py` of a strategy's folder."""
    root = checkout_dir()
    if root is None or folder.resolve() != root.resolve():
        module, config, test = f"{name}.py", f"{kind}/{name}.yaml", f"test_{name}.py"
        return {"module": folder / module, "config": folder / config, "test": folder / test}, name
    package, imported = folder / "src" / "gnnpar" / KINDS[kind], f"gnnpar.{KINDS[kind]}.{name}"
    files = {
        "module": package / f"{name}.py",
        "config": folder / "conf" / kind / f"{name}.yaml",
        "test": folder / "tests" / TESTS[kind] / f"test_{name}.py",
    }
    if kind != "strategy":
        return files, imported
    files |= {"module": package / name / "strategy.py", "package": package / name / "__init__.py"}
    return files, f"{imported}.strategy"


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
    files, imported = places_of(kind, name, folder)
    steps = [] if folder == Path.cwd() else [f"cd {shlex.quote(str(folder))}"]
    steps.append(f"gnnpar check {kind}={name}")
    steps.append(f"python -m pytest {files['test'].relative_to(folder)}")
    if imported != name and kind != "codec":
        steps.append(f"python tests/golden/make.py{f' {name}' if kind == 'strategy' else ''}  # records its losses")
    if "package" in files:
        steps.append(f"add gnnpar.parallel.{name} to the contract of independent methods in pyproject.toml")
    steps.append(f"gnnpar train {kind}={name} debug=tiny")
    return ["next:", *(f"  {step}" for step in steps)]
