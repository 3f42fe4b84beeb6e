"""PyG's own model classes, unchanged, under strategies of gnnpar, beside a plain training loop of PyG.

One process; ranks are threads.
"""

import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, Self  # of JSON

import records
import torch
import torch.nn.functional as F
from pyg_models.cells import OWN, PAIRED, SPECS, STRATEGIES, TOLD
from records import Files
from torch_geometric.data import Data
from torch_geometric.nn import models as zoo
from torch_geometric.transforms import NormalizeFeatures
from torch_geometric.utils import degree

import gnnpar
from gnnpar.data.pyg import as_pyg
from gnnpar.models.initial import construct
from gnnpar.models.pyg.substitutes import keyed_dropout
from gnnpar.parallel.local import LocalRows, Pass

DATA = Path(os.environ["GNNPAR_DATA"]).resolve()
Key = tuple[str, str, str, int]
FEW = 40  # epochs below which AdaQP chooses bits more often
STAGES = ("losses", "accuracy", "paired", "more")
KEPT = ("strategy", "world_size", "seed", "epochs", "metric", "bytes_per_epoch", "hardware", "versions", "commit")


def cora() -> Data:
    """As PyG reads it, its raw files as arrays, rows normalised."""
    return NormalizeFeatures()(as_pyg("cora", DATA))


def narrowed(data: Data, width: int) -> Data:
    """The same with the principal components of the features, scaled to a deviation of 1."""
    x = data.x - data.x.mean(0)
    _, _, directions = torch.linalg.svd(x, full_matrices=False)
    rows = x @ directions[:width].T
    out = data.clone()
    out.x = rows / rows.std(0)
    return out


class Masks(LocalRows):
    """Rows of all nodes in one epoch, as `single` draws their masks."""

    def at(self, layer: int) -> Self:
        return self


def masks(seed: int, epoch: int, num_nodes: int) -> AbstractContextManager[None]:
    """Inside, dropout drops what it drops under gnnpar."""
    ids = torch.arange(num_nodes)
    rows = Masks(ids, ids, run=Pass(seed, epoch, training=True))
    return keyed_dropout(rows, num_nodes)  # pyright: ignore[reportArgumentType] - masks are all that is asked of it


def plain(
    name: str, data: Data, seed: int, *, epochs: int, dtype: torch.dtype, dropout: float, paired: bool = False
) -> dict[str, Any]:
    """PyG's own loop, from the initial weights that gnnpar draws for the same seed; masks are torch's own, or, paired,
    gnnpar's."""
    spec = SPECS[name]
    x, edge_index, y = data.x.to(dtype), data.edge_index, data.y
    kwargs = dict(spec["kwargs"])
    if name in TOLD["degrees"]:
        kwargs["deg"] = torch.bincount(degree(edge_index[1], data.num_nodes).long())
    classes = int(y.max()) + 1
    net = construct(
        lambda: getattr(zoo, name)(in_channels=x.shape[1], out_channels=classes, dropout=dropout, **kwargs), seed
    ).to(dtype)
    torch.manual_seed(seed)
    optimizer = torch.optim.Adam(net.parameters(), lr=spec["lr"], weight_decay=TOLD["given"]["optim.weight_decay"])
    losses, best = [], (-1.0, 0.0)
    for epoch in range(epochs):
        net.train()
        optimizer.zero_grad()
        with masks(seed, epoch, data.num_nodes) if paired else nullcontext():
            logits = net(x, edge_index)
        loss = F.cross_entropy(logits[data.train_mask], y[data.train_mask])
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
        if (epoch + 1) % TOLD["given"]["eval_every"] == 0 or epoch + 1 == epochs:
            net.eval()
            with torch.no_grad():
                right = (net(x, edge_index).argmax(1) == y).double()
            val, test = float(right[data.val_mask].mean()), float(right[data.test_mask].mean())
            best = max(best, (val, test), key=lambda pair: pair[0])
    return {"losses": losses, "test": best[1], "result": {"seed": seed, "epochs": epochs}}


def ours(name: str, strategy: str, data: Data | None, seed: int, **overrides: object) -> dict[str, Any]:
    """`gnnpar train model=pyg`; `refused` is the line where the strategy does not carry the model."""
    spec = SPECS[name]
    given: dict[str, Any] = {"strategy": strategy, "model.target": f"torch_geometric.nn.models.{name}", "seed": seed}
    given |= TOLD["given"] | {"dataset.self_loops": spec["loops"], "optim.lr": spec["lr"]}
    given |= {**overrides, **STRATEGIES[strategy]}
    with tempfile.TemporaryDirectory() as folder:
        try:
            run = gnnpar.train("pyg", "cora" if data is None else data, folder=folder, **given)
        except ValueError as error:
            return {"refused": str(error)}
        losses = run.history["loss/train"].tolist()
        result = {key: run.result[key] for key in KEPT}
    return {"losses": losses, "test": result["metric"]["test_at_best_val"], "result": result}


def cell(stage: str, name: str, variant: str, seed: int, data: Data, epochs: int) -> dict[str, Any]:
    """losses: all features, fp64, no dropout. accuracy, paired, more: fp32, dropout, some models on fewer features."""
    spec = SPECS[name]
    exact = stage == "losses"
    dropout = 0.0 if exact else spec["dropout"]
    shown = narrowed(data, spec["width"]) if spec["width"] and not exact else data
    if variant in (OWN, PAIRED):
        dtype = torch.float64 if exact else torch.float32
        return plain(name, shown, seed, epochs=epochs, dtype=dtype, dropout=dropout, paired=variant == PAIRED)
    given: dict[str, Any] = {"model.kwargs": {**spec["kwargs"], "dropout": dropout}, "epochs": epochs}
    given |= {"precision": "fp64" if exact else "fp32", "data_dir": DATA}
    if variant == "adaqp" and epochs < FEW:
        given |= TOLD["short"]
    return ours(name, variant, None if shown is data else shown, seed, **given)


def cells_of(stage: str, names: Sequence[str], seeds: int) -> list[Key]:
    """(stage, model, variant, seed), in the order in which they run."""
    if stage == "more":
        asked, variants = range(seeds, 20), (OWN, "single")
        names = [name for name in TOLD["more"] if name in names]
    elif stage == "paired":
        asked, variants = range(seeds), (PAIRED,)
        names = [name for name in names if name in TOLD["paired"]]
    elif stage == "losses":
        asked, variants = range(1), (OWN, *(name for name in STRATEGIES if name != "control"))
    else:
        asked, variants = range(seeds), (OWN, *(name for name in STRATEGIES if name not in TOLD["losses_alone"]))
    return [(stage, name, variant, seed) for name in names for seed in asked for variant in variants]


def key_of(row: Mapping[str, Any]) -> Key:
    return row["stage"], row["model"], row["variant"], row["seed"]


def run(files: Files, *, stage: tuple = STAGES, models: tuple = tuple(SPECS), seeds: int = 5) -> None:
    """Run cells that are not in the file; in a rehearsal with one seed and ten epochs."""
    torch.set_num_threads(1)
    data = cora()
    done = {key_of(row): row for row in files.read()}
    refused = {key[1:3] for key, row in done.items() if "refused" in row}
    seeds = 1 if files.smoke else seeds
    stages = [each for each in stage if not (files.smoke and each == "more")]
    for key in [key for each in stages for key in cells_of(each, models, seeds) if key not in done]:
        stage, name, variant, seed = key
        if (name, variant) in refused:
            continue
        spec = SPECS[name]
        epochs = spec["steps"] if stage == "losses" else 10 if files.smoke else spec["epochs"]
        row = cell(stage, name, variant, seed, data, epochs)
        if stage != "losses" and "losses" in row:
            row["losses"] = [round(loss, 6) for loss in row["losses"]]
        if "refused" in row:
            refused.add((name, variant))
        records.append(files(), [{"stage": stage, "model": name, "variant": variant, "seed": seed, **row}])
        print(f"{' '.join(map(str, key))}: {row.get('refused') or row['test']}", flush=True)
