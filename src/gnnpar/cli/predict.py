"""`gnnpar predict RUN ...`: write a trained model's logits of all nodes, distributed, out of core if needed."""

from __future__ import annotations

import os
import tempfile
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from gnnpar.config.inputs import group_of, key_of, sets
from gnnpar.files import require_writable
from gnnpar.settings import ConfigError, Settings, config_errors
from gnnpar.track.console import complain, say

if TYPE_CHECKING:
    from gnnpar.data.preprocess import DatasetConfig
    from gnnpar.training.checkpoint.files import Checkpoint

HELP = """Write the logits of every node, [nodes, outputs], to a .npy file. It takes the overrides of `gnnpar train`:
the graph (dataset=NAME, or shards=FOLDER; default: the run's own), world_size=N, strategy=NAME; strategy=sar
strategy.logical_parts=N holds one part of the graph at a time. Model, precision and preparation of features are the
run's; files that set several groups (+experiment=NAME, debug=NAME) are refused."""

_GRAPH = ("dataset", "shards")
_OF_THE_RUN = ("model", "task", "precision", "seed", "features", "features_dim", "first_layer")
_OF_THE_RUN += ("optim", "epochs", "resume", "plan")


def run(argv: list[str]) -> int:
    """Return 0 if the file is written, 1 if a rank failed, 2 without a valid checkpoint or for wrong overrides."""
    parser = parser_of_run("predict", HELP)
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to (predictions.npy or scores.npy of the run)")
    parser.add_argument(
        "--pairs", type=Path, metavar="FILE", help="of task=link: scores of these, .npy [n, 2] of nodes"
    )
    parser.add_argument("overrides", nargs="*", help="dataset=NAME shards=FOLDER strategy=NAME world_size=N ...")
    options = parser.parse_intermixed_args(argv)
    from gnnpar.cli.train import plan_source_of
    from gnnpar.launch.launch import launch, world_of
    from gnnpar.training.checks import check
    from gnnpar.training.predict import Hooks, Prediction
    from gnnpar.training.result.trained import find

    with config_errors():
        found, trained = find(options.run, options.which)
        settings = with_model_of(trained, found, options.overrides)
        world = world_of(settings)
        check(settings, world)
        pairs = options.pairs and checked_pairs(options.pairs.absolute(), trained)
    name = "predictions.npy" if pairs is None else "scores.npy"
    out = (options.out or run_folder(options.run, found.folder) / name).absolute()
    require_writable(out)
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = out.with_name(f".{out.name}.{os.getpid()}.partial")
    with tempfile.TemporaryDirectory(prefix="gnnpar-") as folder:
        scratch = Path(folder)
        source, remedy = plan_source_of(settings), bound_to_its_graph(trained, settings, options.overrides)
        work = Prediction(settings, world, source, found.folder, scratch, out, partial, pairs, remedy)
        try:
            outcome = launch(world, work, Hooks(settings, scratch), how=settings.launch, comm=settings.comm)
        finally:
            partial.unlink(missing_ok=True)  # for any outcome on rank 0
    if outcome.exit_code:
        complain(outcome.error or "the prediction has failed and gives no reason")
    elif int(os.environ.get("RANK", "0")) == 0:
        say(f"epoch {found.epoch}  ->  {os.path.relpath(out)}")
    return outcome.exit_code


def parser_of_run(command: str, description: str) -> ArgumentParser:
    """Return a parser of RUN and --which."""
    parser = ArgumentParser(f"gnnpar {command}", description=description)
    parser.add_argument("run", type=Path, metavar="RUN", help="the folder of a run, or one of its checkpoints")
    which = "checkpoint: best on validation, last"
    parser.add_argument("--which", choices=("best", "last"), default="best", help=which)
    return parser


def checked_pairs(file: Path, trained: Settings) -> Path:
    """Return the file. Raise ValueError if it holds no pairs of nodes, or the run does not score pairs."""
    from gnnpar.data.columns import load_npy

    if trained.task.decoder is None:
        raise ValueError(
            f"--pairs {file.name}: the run was not trained with task=link, and scores no pairs; leave it out"
        )
    try:
        table = load_npy(file, mapped=True)
    except (OSError, ValueError) as error:
        raise ValueError(
            f"--pairs {file} cannot be read ({' '.join(str(error).split())[:160]}); give a .npy"
        ) from error
    if table.ndim != 2 or table.shape[1] != 2 or not len(table) or table.dtype.kind not in "iu":
        raise ValueError(f"--pairs {file} is {table.dtype} {list(table.shape)}; give node ids [pairs, 2], integers")
    return file


def with_model_of(trained: Settings, found: Checkpoint, overrides: Sequence[str]) -> Settings:
    """Compose the overrides with the model of a run, and with its dataset unless they name one."""
    from gnnpar.config.compose import chosen_of_several, compose

    if (several := chosen_of_several(overrides)) is not None:
        raise ConfigError(f"{several}: also sets keys that {found.folder} decides; set single keys instead")
    if asked := next((o for o in overrides if group_of(o) in _OF_THE_RUN), None):
        raise ConfigError(f"{asked}: a prediction takes it from {found.folder}; leave it out")
    settings = compose(overrides)
    own = {"model": trained.model, "task": trained.task, "precision": trained.precision, "seed": trained.seed}
    own |= {"features": trained.features, "features_dim": trained.features_dim}
    names = {group: trained.names.get(group, "") for group in ("model", "task")}
    another = next((o for o in overrides if group_of(o) in _GRAPH), None)
    if another and not sets(overrides, *_GRAPH, "shards.folder"):
        raise ConfigError(f"{another}: of which graph? set dataset=NAME, or leave it out to predict the run's own")
    if another and trained.task.decoder is not None:
        raise ConfigError(
            f"{another}: {found.folder} has task={names['task']}, with rows from its own training edges; "
            "leave it out, or call gnnpar.load(RUN) with another graph"
        )
    own["dataset"] = trained.dataset if another is None else prepared_as(trained, settings, found, overrides)
    if another is None:
        names["dataset"] = trained.names.get("dataset", "")
    return replace(
        settings,
        **own,
        first_layer=trained.first_layer,
        checkpoint=replace(settings.checkpoint, keep=0),
        names={**settings.names, **names},
    )


def bound_to_its_graph(trained: Settings, settings: Settings, overrides: Sequence[str]) -> str:
    """Return advice for a graph that differs from the run's; empty if any graph is allowed."""
    from gnnpar.data.preprocess import Preprocess

    if not any(group_of(o) in _GRAPH for o in overrides):
        return "name that graph by dataset= if it is meant"
    if trained.features != "given":
        return f"features={trained.features} has a vector for each node of its own graph, and of no other; give that"
    both = settings.dataset, trained.dataset
    if all(isinstance(each, Preprocess) and each.normalize == "standard" for each in both):
        return (
            "features were standardised by the mean and deviation of its own training nodes; standardise those of "
            "another graph in the same way and set dataset.normalize=none"
        )
    return ""


def prepared_as(trained: Settings, settings: Settings, found: Checkpoint, overrides: Sequence[str]) -> DatasetConfig:
    """Return the requested dataset with the run's preparation, except for keys that overrides set."""
    from gnnpar.data.preprocess import Preprocess

    mine, original, shards = settings.dataset, trained.dataset, settings.shards.folder
    if not (isinstance(mine, Preprocess) and isinstance(original, Preprocess)):
        return mine
    typed = {key_of(override).removeprefix("dataset.") for override in overrides}
    for name, value in original.preparation.items():
        if (own := mine.preparation[name]) == value:
            continue
        if shards is not None:
            raise ConfigError(
                f"shards={shards} were made with dataset.{name}={own}, and {found.folder} trained with {value}: make "
                f"them again with gnnpar partition dataset.{name}={value}"
            )
        if name not in vars(mine):
            raise ConfigError(
                f"{found.folder} trained with dataset.{name}={value}, which dataset={settings.names['dataset']} has "
                "not: give that graph as dataset=npz"
            )
        if name not in typed:
            mine = replace(mine, **{name: value})
    return mine


def run_folder(given: Path, found: Path) -> Path:
    """Return the folder for output files: the run's, or the folder of a checkpoint without a run."""
    from gnnpar.training.checkpoint import files as checkpoint

    alone = found == given and given.resolve().parent.name != checkpoint.FOLDER
    return given.resolve() if alone else found.resolve().parent.parent
