"""Probe of a user's model or strategy before several ranks train: compare loss, gradients and logits of a small graph
in parts, and whole on one device."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

import torch

from gnnpar.data.dataset import Dataset
from gnnpar.parallel.halo.strategy import GraphParallel
from gnnpar.parallel.single.strategy import Single
from gnnpar.parallel.strategy import Strategy
from gnnpar.settings import ConfigError, Settings
from gnnpar.targets import classes_in, is_own
from gnnpar.training.shards import source_of
from gnnpar.verify.conformance import CPU, Case, Outcome, compared, runs_on, train_in_threads
from gnnpar.verify.soundness import cannot_run, mixing_of_rows, small_like

Verified = Literal["probed", "checked", "no"]
"""Evidence that a run is exact: a probe; the conformance suite; the strategy's own claim."""
_DIFFERS = 1e-6  # rows that depend on others differ by far more, sums in another order by far less


def probe(settings: Settings, size: int) -> Verified:
    """Return the evidence that a run on `size` ranks is exact. One rank computes all rows: only the order of edges is
    probed. ConfigError if ranks would train another model than one device, if a PyG model depends on the order of its
    edges, or if a strategy is less exact than it claims."""
    groups = (settings.resolved.get(name) for name in ("strategy", "model"))
    own_strategy, own_model = (all(map(is_own, classes_in(group))) for group in groups)
    alone: Verified = "checked" if own_strategy else "no"
    if (own_strategy and own_model) or (size == 1 and not settings.model.wraps):
        return alone
    threads, state = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1)  # a process that forks ranks may have only one thread
    try:
        small = _small(settings, size)
        if small is not None and settings.model.wraps:
            _refuse_order_of_edges(settings, small.graph)
        if size == 1 or small is None:
            return alone if size == 1 else "no"
        if not own_model:
            _refuse_mixing(settings, small)
        return "probed" if own_strategy or _confirms_exactness(settings, small) else "no"
    finally:
        torch.set_num_threads(threads)
        torch.set_rng_state(state)


class Small(NamedTuple):
    """A small graph, and the results of one device on it."""

    graph: Dataset
    whole: Outcome


def _small(settings: Settings, size: int) -> Small | None:
    """Return the small graph and its results. Load the dataset if the model runs with its widths and rows only. Some
    aggregations of PyG, as the median, fail if node 0 has no edge. None if it fails there too: a rank reports the
    error."""
    error, like, dataset = Exception(), None, cache(lambda: _dataset(settings))
    for load, isolated in ((lambda: None, True), (dataset, True), (dataset, False)):
        try:
            like = load()
            graph = small_like(settings.model, like, isolated=isolated)
            whole = train_in_threads(Single(), settings.model, graph, world=1, epochs=1)
        except Exception as raised:  # a model may raise anything on another graph
            error = raised
        else:
            if bool(whole.logits.isfinite().all()):
                return Small(graph, whole)
    if size > 1 and like is not None:
        raise _refused(settings, str(cannot_run(error)))
    return None


def _dataset(settings: Settings) -> Dataset:
    """Return the dataset with the number of logits in place of classes, for any task."""
    source = source_of(settings)
    dataset = settings.load_dataset() if source is None else source.dataset(settings)
    return replace(
        dataset, task="single_label", num_classes=settings.task.of(dataset.task, dataset.num_classes).out_dim
    )


def _in_parts(strategy: Strategy, settings: Settings, small: Small, parts: int) -> tuple[Case, bool]:
    """Compare a strategy with one device; return the case, and whether it differs."""
    case = compared(strategy, "", settings.model, small.graph, parts, small.whole, CPU, {"epochs": 1})
    return case, max(case.loss_error, case.worst_gradient_error, case.logits_error) > _DIFFERS


def _refuse_order_of_edges(settings: Settings, graph: Dataset) -> None:
    from gnnpar.verify.pyg_reference import reads_order_of_edges  # imports PyG

    try:
        found = reads_order_of_edges(settings.model, graph)
    except Exception:  # a model may raise anything on another graph
        return
    if found:
        raise ConfigError(
            f"model={settings.names.get('model')}: its output depends on the order of edges in edge_index, which "
            "gnnpar sorts by destination. Select edges by a mask, and let a message read its own edge alone"
        )


def _refuse_mixing(settings: Settings, small: Small) -> None:
    case, differs = _in_parts(GraphParallel(), settings, small, 4)  # two parts may hide a faulty maximum
    if not differs or not _is_reproducible(settings, small):
        return
    why = f"the model mixes rows ({case.error or 'parts of a graph give others than the whole'})"
    try:
        fault = mixing_of_rows(settings.model, small.graph)
    except Exception:  # the model reads rows of its own graph only
        fault = None
    raise _refused(settings, str(fault or " ".join(why.split())[:400]))


def _is_reproducible(settings: Settings, small: Small) -> bool:
    """Return True if equal seeds give equal weights. If not, ranks report it."""
    graph, logits = small.graph, small.whole.logits.shape[1]
    first, again = (
        settings.model.on(graph.edge_sizes).build(graph.num_features, logits, seed=0).state_dict() for _ in range(2)
    )
    return all(torch.equal(first[name], again[name]) for name in first if isinstance(first[name], torch.Tensor))


def _confirms_exactness(settings: Settings, small: Small) -> bool:
    """Return True if a strategy that claims to be exact equals the single device. ConfigError if it does not. False if
    it makes no such claim, or cannot run on two ranks here."""
    strategy, name = settings.strategy, settings.names.get("strategy")
    if strategy.exactness != {"exact"} or not runs_on(strategy, 2, settings.model, epochs=1):
        return False
    case, differs = _in_parts(strategy, settings, small, 2)
    if case.error is None and differs:
        raise ConfigError(
            f"strategy={name}: claims to be exact, but on two ranks of a small graph it differs from the single "
            f"device (loss by {case.loss_error:.1e}, {case.worst_parameter} by {case.worst_gradient_error:.1e}). "
            f"Correct its exactness, or its messages (gnnpar check strategy={name})"
        )
    return case.error is None


def _refused(settings: Settings, why: str) -> ConfigError:
    return ConfigError(
        f"model={settings.names.get('model')}: {why}. Several ranks would train another model than one device: set "
        "world_size=1, or let a row depend on its own node and on in-edges alone (for vectors learned for each node "
        "set features=learned)"
    )
