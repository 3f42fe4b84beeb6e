"""The pages of reference, made from what they describe: every command's --help, every YAML with the types and ranges of
its class, and the schema of result.json."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import json
import os
import re
import typing
from collections.abc import Iterator, Mapping
from importlib import resources
from typing import Any

import yaml

from gnnpar.cli.main import COMMANDS
from gnnpar.paths import conf_dir, locate
from gnnpar.settings import NOT_KEYS, Settings, describe

GROUPS = ("strategy", "model", "dataset", "partition", "codec", "optim", "comm", "launch", "topology", "tracker")
KEY = re.compile(r"^(?P<indent> *)(?P<key>[\w@/]+): *(?P<value>[^#]*?) *(?:# ?(?P<meaning>.*))?$")


def commands() -> str:
    """Every command's --help but that of `train`, whose keys have a page of their own, and of `ablate`, an alias."""
    parts = ["# Commands\n", "As `gnnpar COMMAND --help` prints them.\n"]
    parts.append(
        "## train\n\nHydra overrides: [keys](keys.md), [train](../guide/train.md), [sweeps](../guide/sweeps.md).\n"
    )
    for command in COMMANDS:
        if command not in ("train", "ablate"):
            parts.append(f"## {command}\n\n```\n{_help(command).rstrip()}\n```\n")
    return "\n".join(parts)


def _help(command: str) -> str:
    output = io.StringIO()
    os.environ["COLUMNS"] = "100"
    with contextlib.redirect_stdout(output), contextlib.suppress(SystemExit):
        importlib.import_module(f"gnnpar.cli.{command}").run(["--help"])
    return output.getvalue()


def keys() -> str:
    """Every key of config.yaml, and of every YAML of every group."""
    text = (conf_dir() / "config.yaml").read_text(encoding="utf-8").partition("\nhydra:")[0]
    types = {name: hint for name, hint in _types(Settings).items() if name not in (*NOT_KEYS, *GROUPS)}
    parts = [
        "# YAML keys\n",
        "`gnnpar train KEY=VALUE`: checked before any rank starts. Values are those of `conf/`.\n",
        f"## Of every run\n\n{_table(text, types)}",
    ]
    for group in GROUPS:
        parts.append(f"## {group}\n")
        for file in sorted((conf_dir() / group).glob("*.yaml")):
            parts.append(f"### {group}={file.stem}\n\n{_option(file.read_text(encoding='utf-8'))}")
    return "\n".join(parts)


def _option(text: str) -> str:
    """One YAML of a group: the first paragraph of its class, and its keys. What it inherits is its parent's."""
    data = yaml.safe_load(text) or {}
    parents = [each for each in data.get("defaults", ()) if isinstance(each, str) and each != "_self_"]
    target = data.get("_target_")
    named = locate(target) if isinstance(target, str) else None
    summary = _plain((named.__doc__ or "").strip().split("\n\n")[0] if named is not None else "")
    inherited = f"As `{parents[0].removeprefix('/')}`, with the keys below.\n" if parents else ""
    hints = _types(named) if isinstance(named, type) and dataclasses.is_dataclass(named) else {}
    return "\n".join(
        part for part in (" ".join(summary.split()) + "\n" if summary else "", inherited, _table(text, hints)) if part
    )


def _types(cls: type) -> dict[str, str]:
    """field -> what it must be, in words."""
    try:
        hints = typing.get_type_hints(cls, include_extras=True)
    except NameError:  # of a module that only a type checker imports
        return {}
    types: dict[str, str] = {}
    for field in dataclasses.fields(cls):
        hint = hints[field.name]
        if isinstance(hint, type) and dataclasses.is_dataclass(hint):
            types |= {f"{field.name}.{name}": text for name, text in _types(hint).items()}
        elif field.init:
            types[field.name] = describe(hint)
    return types


def _table(text: str, types: Mapping[str, str]) -> str:
    rows = [
        f"| `{name}` | {_cell(f'`{value}`' if value else '')} | {_cell(types.get(name, ''))} | {_cell(meaning)} |"
        for name, value, meaning in _keys(text)
    ]
    if not rows:
        return ""
    return "| key | value | must be | meaning |\n|---|---|---|---|\n" + "\n".join(rows) + "\n"


def _keys(text: str) -> Iterator[tuple[str, str, str]]:
    """(name, value, comment) of every line that sets a key."""
    outer = ""
    for line in text.splitlines():
        found = KEY.match(line)
        if found is None or found["key"] in ("defaults", "_target_"):
            continue
        name, value, meaning = found["key"], found["value"], found["meaning"] or ""
        if found["indent"]:
            name = f"{outer}.{name}"
        elif not value:
            outer = name
            continue
        yield name, value, meaning


def _cell(text: str) -> str:
    return _plain(text).replace("|", "\\|")


def _plain(text: str) -> str:
    """Brackets outside code are no links."""
    return "".join(part if i % 2 else part.replace("[", "\\[") for i, part in enumerate(re.split("(`[^`]*`)", text)))


def result() -> str:
    """The members of result.json."""
    file = resources.files("gnnpar.training.result").joinpath("result.schema.json")
    schema: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))  # JSON
    parts = ["# result.json\n", schema.get("description", "") + "\n", "| member | type | meaning |\n|---|---|---|"]
    parts += _members(schema, "")
    return "\n".join(parts) + "\n"


def _members(schema: Mapping[str, Any], prefix: str) -> Iterator[str]:
    optional = set(schema.get("properties", {})) - set(schema.get("required", ()))
    for name, part in schema.get("properties", {}).items():
        absent = " (may be absent)" if name in optional else ""
        yield f"| `{prefix}{name}` | {_cell(_kind(part))}{absent} | {_cell(part.get('description', ''))} |"
        yield from _members(part, f"{prefix}{name}.")


def _kind(part: Mapping[str, Any]) -> str:
    if "const" in part:
        return f"`{json.dumps(part['const'])}`"
    if "enum" in part:
        return ", ".join(f"`{json.dumps(value)}`" for value in part["enum"])
    if "anyOf" in part or "oneOf" in part:
        return " or ".join(_kind(each) for each in part.get("anyOf") or part["oneOf"])
    kind = part.get("type", "any")
    text = " or ".join(kind) if isinstance(kind, list) else str(kind)
    if "items" in part:
        text = f"{text} of {_kind(part['items'])}"
    bounds = [
        f"{sign} {part[name]}"
        for name, sign in (("minimum", ">="), ("exclusiveMinimum", ">"), ("maximum", "<="))
        if name in part
    ]
    return " ".join([text, *bounds])
