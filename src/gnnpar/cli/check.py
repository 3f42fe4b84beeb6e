"""`gnnpar check strategy=...`: the conformance suite as a command, also for a strategy in the user's own folder."""

from __future__ import annotations

import os
import re
from argparse import ArgumentParser
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.text import Text

from gnnpar.config.compose import chosen_of_several, compose
from gnnpar.config.inputs import group_of
from gnnpar.paths import conf_dir, installed_confs
from gnnpar.settings import ConfigError, Settings, config_errors
from gnnpar.targets import TRUST
from gnnpar.track.console import say, show_table

if TYPE_CHECKING:
    from gnnpar.codecs.codec import CodecConfig
    from gnnpar.models.gnn import ModelSource
    from gnnpar.verify.conformance import Case

_UNREAD = ("task", "shards", "partition", "features", "features_dim", "optim", "precision", "tf32")
HELP = """Compare a strategy with the single device in fp64, for every model and world: the loss and each gradient of
its exact limit, and of the strategy as configured if it claims to be exact. A strategy with an oracle is compared
with it, as configured. A PyG model must train as in PyG's own loop: losses and gradients of three steps of Adam, then
weights and running statistics, on the unprepared graph. Runs on the GPU if there is one (device=cpu: on the CPU).
`gnnpar check strategy=mine model=my_model` also reads strategy/ and model/ of this folder; without model=, it checks
every model, those of model/ only with --trust. The graph is a small one, or that of dataset=..., whole, in fp64, in
every world: choose one of some thousand nodes.
`gnnpar check codec=mine`, without a strategy: the laws that every codec keeps."""


def run(argv: list[str]) -> int:
    """Return 0 if all cases pass, else 1."""
    parser = ArgumentParser("gnnpar check", description=HELP)
    parser.add_argument("--worlds", default="1,2,3,4", help="world sizes, as threads (1,2,3,4)")
    parser.add_argument("overrides", nargs="*", help="strategy=NAME, model=NAME[,NAME], key=value ...")
    options = parser.parse_intermixed_args(argv)
    if not re.fullmatch(r"[1-9]\d*(,[1-9]\d*)*", options.worlds):
        raise ConfigError(f"--worlds={options.worlds} must be whole numbers >= 1, separated by commas")
    worlds = tuple(map(int, options.worlds.split(",")))
    asked = {o.partition("=")[0]: o for o in options.overrides}
    refuse_unread(options.overrides)
    if "codec" in asked and "strategy" not in asked:
        return run_codec(compose(options.overrides).codec, asked["codec"])
    chosen = [o.partition("=")[2] for o in options.overrides if o.startswith("model=")]
    rest = [o for o in options.overrides if not o.startswith("model=")]
    models = chosen[-1].split(",") if chosen else model_names()
    settings = {name: compose([*rest, f"model={name}"]) for name in models}
    first = next(iter(settings.values()))
    found = {name: s.model for name, s in settings.items()} if chosen else not_refused(settings)
    cases = cases_of(first, found, worlds=worlds, own_graph=any(map(asks_for_graph, options.overrides)))
    cutting = first.strategy.capabilities.by_layers
    for line in (line for m in found.values() for line in (*m.aggregation_paths(), *(m.cuts() if cutting else ()))):
        say(line)
    failed = sum(not case.passed for case in cases)
    say(f"{len(cases) - failed} of {len(cases)} cases pass")
    return 1 if failed else 0


def not_refused(settings: Mapping[str, Settings]) -> dict[str, ModelSource]:
    """Return the models that the strategy supports, and print why it refuses the others."""
    from gnnpar.parallel.needs import refuse

    found: dict[str, ModelSource] = {}
    for name, each in settings.items():
        try:
            refuse(each.strategy, each.model, each.names)
            found[name] = each.model
        except ValueError as error:
            say(f"left out: {error}")
    if not found:
        raise ConfigError("the strategy refuses every model. Give model=NAME, or another strategy.")
    return found


def cases_of(
    settings: Settings, models: Mapping[str, ModelSource], *, worlds: Sequence[int], own_graph: bool
) -> list[Case]:
    """Return the cases of a strategy, on the dataset of the settings or a small graph, and print their table."""
    import torch

    from gnnpar.data.preprocess import Preprocess
    from gnnpar.launch.launch import device_of
    from gnnpar.parallel.needs import refuse_row_order
    from gnnpar.verify import conformance

    with config_errors():
        device = torch.device(device_of(settings.device))
        dataset = settings.load_dataset() if own_graph else None
        if dataset is not None:
            say(f"{dataset.name}: {dataset.num_nodes:,} nodes, {dataset.num_edges:,} edges")
        refuse_row_order(settings.strategy, settings.row_order, settings.task, settings.names)
        given = None
        if own_graph and any(model.wraps for model in models.values()) and isinstance(settings.dataset, Preprocess):
            kept = replace(settings.dataset, self_loops="keep", drop_duplicates=False)
            given = replace(settings, dataset=kept).load_dataset()
        cases = conformance.check(
            settings.strategy,
            models,
            worlds=worlds,
            dataset=dataset,
            as_it_is=own_graph,
            given=given,
            first_layer=settings.first_layer,
            row_order=settings.row_order,
            device=device,
        )
    strategy = settings.names.get("strategy", "?")
    if not cases:
        raise ConfigError(f"no world of {', '.join(map(str, worlds)) or 'no'} ranks can run strategy={strategy}")
    show(cases, strategy)
    return cases


def refuse_unread(overrides: Sequence[str]) -> None:
    """Raise ConfigError for a key that changes numbers and is not read, or a file that sets several groups."""
    if (several := chosen_of_several(overrides)) is not None:
        raise ConfigError(f"{several}: also sets keys that gnnpar check does not read; set single keys instead")
    for override in overrides:
        if (group := group_of(override)) in _UNREAD and override != "precision=fp64":
            raise ConfigError(
                f"{override}: gnnpar check trains on labels, parts drawn at random, in fp64 by gradient descent, and "
                f"reads no {group}; leave it out"
            )


def asks_for_graph(override: str) -> bool:
    """Return True for overrides of the dataset; `dataset.self_loops` belongs to the small graph, too."""
    return group_of(override) == "dataset" and not override.startswith("dataset.self_loops=")


def run_codec(codec: CodecConfig, title: str) -> int:
    """Return 0 if the codec keeps all laws, else 1."""
    from gnnpar.verify.codec_laws import check_codec

    laws = check_codec(codec)
    rows = [(law.name, _verdict(law.passed), law.seen) for law in laws]
    show_table(("law", "", "seen"), rows, title=f"{title}, on three parts of a small graph", left=(0, 1, 2))
    kept = sum(law.passed for law in laws)
    say(f"{kept} of {len(laws)} laws hold")
    return 0 if kept == len(laws) else 1


def model_names() -> list[str]:
    """Return every model: of gnnpar, of installed packages and, with --trust, of the working directory."""
    folders = [conf_dir(), *installed_confs(), *([Path.cwd()] if os.environ.get(TRUST) == "1" else [])]
    names = {file.stem for folder in folders for file in folder.glob("model/*.yaml")}
    return sorted(names - {"pyg"})  # pyg needs a target


def show(cases: Sequence[Case], strategy: str) -> None:
    from gnnpar.verify.conformance import AS_CONFIGURED

    titles = {
        "single device": f"strategy={strategy}, in its exact limit, against the single device",
        AS_CONFIGURED: f"strategy={strategy}, as it is configured and called exact, against the single device",
        "PyG": "on one device, against PyG's own loop on the graph as it was given",
        "": f"strategy={strategy}, as it is configured, against its oracle on one device",
    }
    rows: dict[str, list[tuple[str | Text, ...]]] = {reference: [] for reference in titles}
    for case in cases:
        why = case.error or (case.worst_parameter and f"worst: {case.worst_parameter}")
        errors = ("-" if each is None else f"{each:.1e}" for each in (case.loss_error, case.worst_gradient_error))
        row = (case.model, str(case.world), *errors, _verdict(case.passed, why))
        rows[case.reference if case.reference in titles else ""].append(row)
    for reference, title in titles.items():
        if rows[reference] or reference == "single device":
            show_table(("model", "ranks", "loss error", "worst gradient error", ""), rows[reference], title=title)


def _verdict(passed: bool, why: str = "") -> Text:
    return Text("ok") if passed else Text.assemble(("FAILED", "red"), f" {why}" if why else "")
