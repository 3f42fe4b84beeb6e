"""Shell completion of commands, options, groups and keys: `gnnpar --install-completion`.

The shell's function calls `gnnpar --complete LINE`, which reads YAML and parsers without heavy imports. Hydra's own
completion lacks commands, and takes 0.9 s of CPU time per word, this 0.5 s.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from gnnpar.cli import main
from gnnpar.cli.main import COMMANDS
from gnnpar.config.compose import group_options
from gnnpar.config.errors import CONFIG
from gnnpar.files import write_text_atomic
from gnnpar.paths import conf_dir, expanded
from gnnpar.settings import ConfigError, config_errors
from gnnpar.track.console import say

SCRIPT = """\
# completion of gnnpar for bash, and for zsh through bashcompinit
if [ -n "${ZSH_VERSION:-}" ]; then autoload -U +X compinit bashcompinit && compinit && bashcompinit; fi
_gnnpar() {
    local IFS=$'\\n'
    COMPREPLY=($(gnnpar --complete "${COMP_LINE:0:COMP_POINT}" 2>/dev/null))
    case "${COMPREPLY[0]}" in *=|*.) compopt -o nospace 2>/dev/null ;; esac
}
complete -o default -F _gnnpar gnnpar
"""
_COMPOSING = ("train", "data", "partition", "plan", "estimate", "check")  # commands that take overrides
_PLAIN = re.compile(r"[\w.+-]+")  # names of files are typed into the shell without quotes
_ROOT = ("--help", "--version", "--install-completion", "--show-completion")


def run(argv: list[str]) -> int:
    """Print the completions of a line, or the script, or install it. Return 0."""
    if argv[0] == "--install-completion":
        with config_errors():
            install(expanded("~"))
    else:
        lines = complete(" ".join(argv[1:])) if argv[0] == "--complete" else [SCRIPT.rstrip()]
        sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def complete(line: str) -> list[str]:
    """Return the completions of the last word. bash splits words at =, so it needs `gat` for `model=g`."""
    words = line.split()[1:]
    last = "" if line[-1:].isspace() or not words else words.pop()
    if not words:
        return [word for word in (*COMMANDS, *_ROOT) if word.startswith(last)]
    command = words[0]
    if last.startswith("-"):
        return [option for option in options_of(command) if option.startswith(last)]
    if command not in _COMPOSING:
        return []
    groups = group_options()
    key, equals, value = last.rpartition(",")[2].partition("=") if "=" not in last else last.partition("=")
    if equals:
        options = [option for option in groups.get(key, ()) if _PLAIN.fullmatch(option)]
        return [option for option in options if option.startswith(value.rpartition(",")[2])]
    names = [f"{group}=" for group in groups] + [f"{key}=" for key in keys_of(words)]
    return [name for name in dict.fromkeys(names) if name.startswith(last)]


def options_of(command: str) -> list[str]:
    """Return the options in the help of a command."""
    if command not in COMMANDS or command == "train":
        return ["--multirun", "--help", "--cfg"] if command == "train" else []
    text = io.StringIO()
    with contextlib.redirect_stdout(text), contextlib.suppress(SystemExit):
        main.run(command, ["--help"])
    return list(dict.fromkeys(re.findall(r"(?<!\S)\[?(--[a-z][\w-]*)", text.getvalue())))


def keys_of(words: Sequence[str]) -> list[str]:
    """Return the keys of the configuration and of the chosen file of each group."""
    tree = yaml.safe_load((conf_dir() / f"{CONFIG}.yaml").read_text(encoding="utf-8"))
    defaults = [each for each in tree["defaults"] if isinstance(each, dict)]
    chosen = {str(key): str(value) for each in defaults for key, value in each.items()}
    chosen |= dict(word.split("=", 1) for word in words if "=" in word)
    keys = _flat({key: value for key, value in tree.items() if key not in ("defaults", "hydra")})
    for group, options in group_options().items():
        file = conf_dir() / group / f"{chosen.get(group)}.yaml"
        if chosen.get(group) in options and file.is_file():  # a name with .. is another file
            keys += [f"{group}.{key}" for key in _flat(yaml.safe_load(file.read_text(encoding="utf-8")) or {})]
    return keys


def _flat(tree: dict[str, object], prefix: str = "") -> list[str]:
    keys: list[str] = []
    for key, value in tree.items():
        if isinstance(value, dict):
            keys += _flat(value, f"{prefix}{key}.")
        elif key not in ("_target_", "defaults"):
            keys.append(f"{prefix}{key}")
    return keys


def install(home: Path) -> None:
    """Write the script below the home folder, and a line that reads it into the shell's start file, once."""
    shell = Path(os.environ.get("SHELL", "")).name
    if shell not in ("bash", "zsh"):
        raise ConfigError(
            f"completion is for bash and zsh, and SHELL is {shell or 'not set'}; gnnpar --show-completion"
        )
    script, start = home / ".local" / "share" / "gnnpar" / "completion.sh", home / f".{shell}rc"
    script.parent.mkdir(parents=True, exist_ok=True)
    write_text_atomic(script, SCRIPT)
    line = f". {shlex.quote(str(script))}"
    try:
        text = start.read_text(encoding="utf-8") if start.exists() else ""
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{start} cannot be read ({error}); add this line to it yourself: {line}") from error
    if line not in text.splitlines():
        with start.open("a", encoding="utf-8") as out:
            out.write(f"{'' if text.endswith(chr(10)) or not text else chr(10)}{line}\n")
    say(f"wrote {script}, which {start} reads: open a new shell, or run: {line}")
