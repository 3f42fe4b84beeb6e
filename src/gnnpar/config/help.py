"""`gnnpar train --help`: the groups, their options and every key as composed. Hydra's own help takes 2.7 s of CPU time,
this 1.25 s: Hydra copies its repository of files for every group in the list."""

from __future__ import annotations

import string
from collections.abc import Sequence
from pathlib import Path

from gnnpar.config.compose import composing, search_installed
from gnnpar.config.errors import CONFIG, hydra_errors
from gnnpar.config.inputs import spelled
from gnnpar.paths import conf_dir, installed_confs
from gnnpar.track.text import printable


def train_help(argv: Sequence[str]) -> str:
    """Fill in the template of conf/config.yaml with the groups and the composed keys."""
    import hydra
    from omegaconf import OmegaConf

    overrides = [argument for argument in argv if not argument.startswith("-")]
    search_installed()
    with hydra_errors(overrides), composing():
        config = hydra.compose(CONFIG, overrides=spelled(overrides), return_hydra_config=True)
    template = string.Template(str(config.hydra.help.template))
    keys = OmegaConf.masked_copy(config, [str(key) for key in config if key != "hydra"])
    lines = "".join(f"{group}: {', '.join(options)}\n" for group, options in group_options().items())
    return printable(template.safe_substitute(APP_CONFIG_GROUPS=lines, CONFIG=OmegaConf.to_yaml(keys))) + "\n"


def group_options() -> dict[str, list[str]]:
    """Return group -> the names of its files: of gnnpar, of installed packages and of the working directory."""
    brought = [conf_dir(), *installed_confs()]
    groups = {str(file.parent.relative_to(root)) for root in brought for file in root.glob("*/**/*.yaml")}
    found = {
        group: {file.stem for root in (*brought, Path()) for file in root.glob(f"{group}/*.yaml")} for group in groups
    }
    return {group: sorted(found[group]) for group in sorted(found) if group.partition("/")[0] != "hydra"}
