"""What users met, and forwards of PyG's examples: PyG's numbers to 1e-9, or one line with the module and a reason."""

# attributes of torch and PyG, and JSON, have no types here
# pyright: reportArgumentType=false

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache

import pytest
from torch import nn
from torch_geometric.data import Data

import gnnpar
from conformance.generated_nets import TARGET, Spec, build, keys_of, kwargs_of
from conformance.plain_loop import EDGE_KEYS, Trained, Verdict, graph, plain, verdict
from conformance.users_nets import EXAMPLES, NETS, of
from conformance.users_nets import TARGET as OF

ALONE = ("single", 1)
PLACES = [("graph_parallel", 2), ("sar", 2), ("gnnpipe", 1), ("feature", 2), ("graph_parallel", 4), ("sar", 4)]
PLACES += [("feature", 4), ("graph_parallel", 1)]


def layer(conv: str, *twists: str, steps: tuple[str, ...] = (), **more: object) -> dict:
    return {"conv": conv, "twists": list(twists), "steps": list(steps), **more}


def net(*layers: dict, **more: object) -> Spec:
    return {"seed": 1, "layers": [*layers], **more}


SAGE, GCN, GAT = "SAGEConv(8, 8)", "GCNConv(8, 8)", "GATConv(8, 4, heads=2)"
MET = {
    "share_weights=True": net(layer("GATv2Conv(8, 8, share_weights=True, edge_dim=4, add_self_loops=False); a")),
    "one matrix under two names": net(layer("TwoNames()")),
    "GCNConv(improved=True) with weights": net(layer("GCNConv(8, 8, improved=True); w")),
    "BatchNorm in eval mode": net(layer(SAGE, steps=("BatchNorm1d",)), held=True),
    "BatchNorm": net(layer(SAGE, steps=("BatchNorm1d",)), layer(SAGE)),
    "update of a subclass": net(layer(GCN, "subclass update tanh")),
    "aggregate of a subclass": net(layer(GCN, "subclass aggregate clamp")),
    "propagate of a subclass": net(layer(SAGE, "subclass propagate double")),
    "message of a subclass": net(layer(GCN, "subclass message tanh")),
    "message of a subclass of GAT": net(layer(GAT, "subclass message tanh")),
    "edge_update of a subclass": net(layer(GAT, "subclass edge_update double")),
    "forward of a subclass": net(layer(GAT, "subclass forward tanh")),
    "message of an instance": net(layer(SAGE, "shadow message tanh")),
    "update of an instance": net(layer(GCN, "shadow update tanh")),
    "message hook": net(layer(SAGE, "hook message double")),
    "message pre-hook": net(layer(GCN, "pre-hook message")),
    "aggregate hook": net(layer(GCN, "hook aggregate tanh")),
    "propagate pre-hook": net(layer(SAGE, "pre-hook propagate")),
    "propagate hook": net(layer(GAT, "hook propagate tanh")),
    "edge_update hook": net(layer(GAT, "hook edge_update double")),
    "forward hook": net(layer(SAGE, "forward hook")),
    **{f"all rows: {how}": net(layer(SAGE, steps=(how,)), layer(SAGE))
       for how in ("virtual node", "pooled", "centred", "columns", "best rows", "embedding", "table", "position")},
    "message over its maximum": net(layer("Largest()")),
    "attributes over their maximum": net(layer("ResGatedGraphConv(8, 8, edge_dim=4); a"), rows=["attr scaled"]),
    "tuple": net(layer(GAT), out="tuple"),
    "dictionary": net(layer(GAT), out="dictionary"),
    "unannotated ptr": net(layer("Soft()")),
    "unannotated ptr and dim_size": net(layer("SoftDim()")),
    "TransformerEncoder over hops": net(layer(SAGE, steps=("hops",))),
    "tensor of forward in a message": net(layer("Closure()")),
    "tensor of forward in update": net(layer("ClosureUpdate()")),
    "parameter of the model in a message": net(layer("OuterReads()")),
    "EdgeConv of a function": net(layer("EdgeConv(lambda rows: rows[:, :8] * rows[:, 8:])")),
    "update(aggr_out, x)": net(layer("UpdateReads()")),
    **{each: net(layer(each)) for each in (
        "AGNNConv(add_self_loops=False)", "SimpleConv()", "SuperGATConv(8, 8, add_self_loops=False)",
        "EGConv(8, 8, ['sum'], num_heads=4, add_self_loops=False)", "FeaStConv(8, 8, add_self_loops=False)",
        "GPSConv(8, SAGEConv(8, 8), heads=2, norm=None, attn_type='performer')", "RGATConv(8, 8, 3); t",
    )},
    "number that changes by epoch": net(layer(SAGE), layer(SAGE), annealed=True),
    "number in a message that changes by epoch": net(layer("Annealed()"), layer(SAGE)),
    "conv.lin outside": net(layer("GCNConv(8, 8, add_self_loops=False)", steps=("tied",))),
    "BatchNorm in a message": net(layer("EdgeConv(nn.Sequential(nn.Linear(16, 8), nn.BatchNorm1d(8)), aggr='mean')")),
    "spectral_norm in a message": net(layer("CGConv(8)", "spectral_norm")),
    "hook of an aggregation": net(layer(SAGE, "aggregation hook")),
    "hook of an aggregation of GCN": net(layer(GCN, "aggregation hook")),
    "two more edges": net(layer("Extra()")),
    "edges that lead upwards": net(layer("Upwards()")),
    "reversed edges": net(layer("Backward()")),
    "scatter by hand": net(layer("ByHand()")),
    "weights doubled": net(layer("GraphConv(8, 8); w"), rows=["weight doubled"]),
    "weights doubled of GCN": net(layer("GCNConv(8, 8); w"), rows=["weight gated"]),
    "weight_norm": net(layer(SAGE, "weight_norm"), layer(SAGE)),
    "spectral_norm": net(layer(SAGE, "spectral_norm"), layer(SAGE)),
    "one convolution twice": net(layer(SAGE), layer(SAGE, same=0)),
    "frozen convolution": net(layer(SAGE, "frozen"), layer(SAGE)),
    "frozen first layer": net(layer(SAGE), **{"frozen first": True}),
}  # fmt: skip
EVERY = [*MET, *NETS, *EXAMPLES]
IGNORE = ("GIN", "jk=lstm", "jk=cat")  # PyG's classes take rows of edges in forward, and their convolutions do not
REFUSED = {"PMLP": "no running statistics"}
IN_TURN = [
    pytest.param(name, marks=() if i % 12 == 0 else pytest.mark.slow)  # with ranks, all are trained
    for i, name in enumerate(name for name in EVERY if name not in REFUSED)
]


def _case(name: str) -> tuple[str, dict, tuple[str, ...], Callable[[], nn.Module]]:
    """Target, arguments, rows of edges that it reads, and the model for PyG's loop."""
    if name in MET:
        target, kwargs, keys, make = TARGET, kwargs_of(MET[name]), keys_of(MET[name]), lambda: build(**kwargs)
    else:
        target, kwargs, make = OF, {"name": name}, lambda: of(name)
        taken = inspect.signature(make().forward).parameters
        keys = () if name in IGNORE else tuple(key for key in EDGE_KEYS[1:] if key in taken)
        keys += ("edge_weight",) if name == "WeightedGCN" else ()
    return target, kwargs, keys, make


@cache
def _due(name: str) -> tuple[str, dict, Data, Trained]:
    """Target, arguments and graph of a case, and what PyG's loop leaves of it."""
    target, kwargs, keys, make = _case(name)
    data = graph(seed=3, dirty=name != "LINKX", edges=keys)
    return target, kwargs, data, plain(make, data)


def _judged(name: str, strategy: str, world: int) -> Verdict:
    target, kwargs, data, due = _due(name)
    return verdict(target, kwargs, data, strategy, world, due, auto=True)


@pytest.mark.quick(2)
@pytest.mark.parametrize("name", [*REFUSED, *IN_TURN])
def test_single_device_trains_what_pyg_trains(name):
    found = _judged(name, *ALONE)
    assert found.kind == ("refused" if name in REFUSED else "equal"), str(found)
    assert REFUSED.get(name, "") in found.why


@pytest.mark.quick(8)
@pytest.mark.parametrize(("name", "place"), [(name, PLACES[i % 4]) for i, name in enumerate(EVERY)])
def test_ranks_train_what_pyg_trains_or_refuse_it(name, place):
    found = _judged(name, *place)
    assert found.good, str(found)
    if found.kind != "equal" and name not in REFUSED:
        assert _judged(name, *ALONE).kind == "equal"


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", EVERY)
def test_all_places_train_what_pyg_trains_or_refuse_it(name, place):
    found = _judged(name, *place)
    assert found.good, str(found)


@pytest.mark.quick(1)
@pytest.mark.parametrize("strategy", ["graph_parallel", "sar"])
@pytest.mark.parametrize(
    "conv",
    ["TransformerConv(8, 8, edge_dim=4); a", "GINEConv(mlp(8, 8), edge_dim=4); a", "NNConv(8, 8, mlp(4, 64)); a"],
)
def test_row_order_keeps_rows_of_edges_with_their_edges(conv, strategy):
    spec = net(layer(conv))
    data = graph(seed=3, edges=("edge_attr",), nodes=48)
    due = plain(lambda: build(**kwargs_of(spec)), data)
    found = verdict(TARGET, kwargs_of(spec), data, strategy, 2, due, row_order="metis")
    assert found.good, str(found)


def test_check_on_the_users_graph_takes_its_widths():
    cases = gnnpar.check(of, graph(seed=3), worlds=(1, 2), **{"model.kwargs": {"name": "Sampled"}})
    assert [case.passed for case in cases] == [True] * len(cases), [case.error for case in cases]
