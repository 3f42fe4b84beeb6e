"""PyG models under strategies: equal to PyG's own loop and to the single device, or refused in one line."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from composing import configured
from gnnpar.models.pyg.model import PyG
from gnnpar.parallel.needs import refuse
from gnnpar.verify.conformance import check
from outcomes import assert_passed

MODELS = "torch_geometric.nn.models"
THREE: dict[str, Any] = {"hidden_channels": 8, "num_layers": 3, "dropout": 0.3}
DEGREES = {"aggregators": ["mean", "max", "std"], "scalers": ["identity", "amplification"]}
LAYERED: dict[str, tuple[str, dict[str, Any]]] = {  # models that can be cut between convolutions
    "GCN": (f"{MODELS}.GCN", {**THREE, "norm": "layer_norm", "norm_kwargs": {"mode": "node"}}),
    "GraphSAGE": (f"{MODELS}.GraphSAGE", {**THREE, "jk": "max"}),
    "GAT": (f"{MODELS}.GAT", {**THREE, "heads": 2, "jk": "cat", "act": "elu"}),
    "GIN": (f"{MODELS}.GIN", {**THREE, "jk": "last"}),
    "PNA": (f"{MODELS}.PNA", {**THREE, **DEGREES}),
    "EdgeCNN": (f"{MODELS}.EdgeCNN", {**THREE, "act_first": True}),
    "Jumping": ("pyg_nets.Jumping", {}),
    "InitialResidual": ("pyg_nets.InitialResidual", {}),
    "Residual": ("pyg_nets.Residual", {}),
    "gated": ("pyg_nets.Residual", {"kind": "gated"}),
    "Branches": ("pyg_nets.Branches", {}),
    "Smoothed": ("pyg_nets.Smoothed", {}),
}
EDGES = {"weighted": ("pyg_nets.weighted", {"kind": "Scaled"}), "typed": ("pyg_nets.Typed", {"kind": "Shifted"})}
EDGES["relational"] = ("pyg_nets.Typed", {})


def layered(name: str) -> PyG:
    target, kwargs = (LAYERED | EDGES)[name]
    return PyG(target=target, kwargs=kwargs)


def net(target: str, *, loops: Any = "auto", **kwargs: Any) -> PyG:
    return PyG(target=f"pyg_nets.{target}", kwargs=kwargs, self_loops=loops)


def folded(strategy: str, target: str) -> PyG:
    drops = target == "gat" or (target == "transformer" and strategy != "feature")
    return net(target, dropout=0.3) if drops else net(target)


FOLDS = ("gcn", "gat", "gated", "transformer")
HALOS = [("adaqp", "edge"), ("bns", "inline"), ("pipegcn", "inline"), ("digest", "edge"), ("cofree", "edge")]
HALOS += [("pipegcn", "gcn"), ("pipegcn", "gat")]
ROWS = [("adaqp", "TransformerConv"), ("digest", "GINEConv"), ("pipegcn", "GATv2Conv"), ("sar", "GINEConv")]
ROWS += [("bns", "GINEConv"), ("bns", "TransformerConv"), ("sar", "TransformerConv"), ("cagnet", "TransformerConv")]
ROWS += [("sancus", "GINEConv"), ("cagnet", "GINEConv")]
BY_TYPE = ["sar", "adaqp", "bns", "pipegcn", "digest", "cofree", "feature", "cagnet", "sancus"]
CASES: dict[str, tuple[str, PyG, int]] = {
    **{f"{s}-{t}": (s, folded(s, t), 2) for s in ("sar", "feature") for t in FOLDS if (s, t) != ("feature", "gated")},
    **{f"{s}-whole {t}": (s, net(t), 2) for s, t in HALOS},
    **{f"{s}-weights": (s, net("weighted", kind="Scaled"), 2) for s in ("sar", "bns")},
    "feature-weights": ("feature", net("weighted", kind="GCNConv"), 2),
    "sar-types": ("sar", net("Typed"), 2),
    **{f"{s}-attributes {kind}": (s, net("Rows", loops=False, kind=kind), 2) for s, kind in ROWS},
    **{f"{s}-dictionaries": (s, net("Typed2", loops=False, hidden=8), 2) for s in BY_TYPE},
    **{f"{s}-HGT": (s, net("HGTNet", loops=False, hidden=8), 2) for s in ("sar", "bns", "feature", "sancus")},
    **{
        f"{s}-dictionaries, transformer": (s, net("Typed2", loops=False, hidden=8, kind="transformer"), 2)
        for s in ("sar", "sancus")
    },
    "sar-to_hetero": ("sar", net("hetero_of", loops=False), 2),
    **{f"gnnpipe-{name}": ("gnnpipe", layered(name), 2 + i % 2) for i, name in enumerate(LAYERED)},
    **{f"gnnpipe-{name}": ("gnnpipe", layered(name), 2) for name in EDGES},
    **{f"hybrid-{name}": ("hybrid", layered(name), 4) for name in ("GCN", "PNA", "Jumping", "InitialResidual")},
    **{f"minibatch-{name}": ("minibatch", layered(name), 3) for name in LAYERED},
}
CASES |= {f"{s}-{t}": (s, folded(s, t), 2) for s, t in product(["adaqp", "bns", "cofree"], FOLDS)}


@pytest.mark.quick(11)
@pytest.mark.parametrize(
    ("strategy", "config", "world"), [pytest.param(*case, id=name) for name, case in CASES.items()]
)
def test_strategies_carry_models_of_pyg(strategy: str, config: PyG, world: int) -> None:
    """In the exact limit, and where there is an oracle, that. With one chunk, or all neighbours."""
    cases = check(configured("strategy", strategy), {"pyg": config}, worlds=(world,))
    assert cases[0].reference == "PyG"
    assert len(cases) >= 2 - (strategy == "cofree")
    assert_passed(cases)


IN_ONE_PIECE = "runs in one piece: it reads dictionaries by type"
IN_PIECES = "folds neighbourhoods in pieces, and conv1 of model=pyg reads whole ones"
NO_LAYERS = {
    "Wavering": r"reads values of tensors \(bool\)",
    "Repeated": "its forward calls conv more than once",
    "Shared": "act.weight is read in two layers, 0 and 1",
    "Outside": "reads a tensor that is made neither of x nor of parameters and buffers; register_buffer it",
}


@pytest.mark.parametrize(
    ("strategy", "config", "line"),
    [
        *((s, net("edge"), IN_PIECES) for s in ("sar", "feature", "cagnet", "sancus")),
        *((s, net("HGTNet", loops=False, hidden=8), IN_ONE_PIECE) for s in ("gnnpipe", "minibatch")),
        (
            "sar",
            net("Typed2", loops=False, hidden=8, kind="median"),
            "folds neighbourhoods in pieces, and convs.0.convs.<a___to___b> of",
        ),
        ("cofree", net("hetero_of", loops=False), "never holds all rows of a layer at once, and norm.a.module of"),
        *(
            (s, net("Normed"), "norm of model=pyg normalises by their mean and variance")
            for s in ("gnnpipe", "minibatch")
        ),
        *(
            (s, net(target), f"strategy={s} runs a model layer by layer.*{line}")
            for target, line in NO_LAYERS.items()
            for s in ("gnnpipe", "hybrid", "minibatch")
        ),
    ],
    ids=str,
)
def test_strategies_that_cannot_say_so_in_one_line(strategy: str, config: PyG, line: str) -> None:
    with pytest.raises(ValueError, match=line) as caught:
        refuse(configured("strategy", strategy), config, {"strategy": strategy, "model": "pyg"})
    assert "\n" not in str(caught.value)
    if str(config.target).rpartition(".")[2] in NO_LAYERS:
        refuse(configured("strategy", "graph_parallel"), config, {})


def test_sar_names_the_setting_that_keeps_it_from_a_model_of_pyg() -> None:
    out_of_core = configured("strategy", "sar", "strategy.logical_parts=3")
    line = r"^strategy=sar with strategy\.logical_parts=3 lets parts take turns within a module, which model=pyg"
    with pytest.raises(ValueError, match=line):
        refuse(out_of_core, net("gcn"), {"strategy": "sar"})
