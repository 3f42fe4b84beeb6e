"""Every convolution of PyG, with its options, under every exact strategy: as in PyG's own loop, or refused."""

from __future__ import annotations

import pytest
from torch_geometric.nn import conv

from conformance.all_convolutions import BEGIN, END, PAGE, SAMPLE, VARIANTS, verdicts
from conformance.plain_loop import STRATEGIES

TYPED = {"HGTConv", "HeteroConv", "HANConv"}  # of dictionaries by type: test_pyg_models.py
NONE = {"MessagePassing", "CuGraphSAGEConv", "CuGraphGATConv", "CuGraphRGCNConv", "FusedGATConv", "WLConv"}
REFUSED = {"HypergraphConv(8, 8, bias=False); w"}  # weights of hyperedges are no rows of edges
QUICK = [
    pytest.param(each, (list(STRATEGIES)[i % len(STRATEGIES)],), id=each) for i, each in enumerate(SAMPLE)
]  # a strategy in turn
ALL = [pytest.param(each, tuple(STRATEGIES), marks=pytest.mark.slow, id=f"all {each}") for each in VARIANTS]


def test_all_convolutions_of_pyg_are_in_the_list():
    assert {each.partition("(")[0] for each in VARIANTS} == set(conv.__all__) - TYPED - NONE
    assert len(VARIANTS) >= 150


@pytest.mark.quick(3)
@pytest.mark.parametrize(("variant", "strategies"), [*QUICK, *ALL])
def test_variants_train_as_in_pyg_or_are_refused(variant, strategies):
    found = verdicts(variant, strategies=strategies)
    if not all(each.kind == "equal" for each in found.values()):  # one strategy refuses it
        found |= verdicts(variant, strategies=("single",))
    alone = found.get("single")
    assert alone is None or alone.kind == "equal" or variant in REFUSED, f"single: {alone}"
    assert all(each.good for each in found.values()), {name: str(each) for name, each in found.items()}


@pytest.mark.slow
def test_page_has_a_row_for_each_convolution():
    text = PAGE.read_text()
    assert BEGIN in text, "python tests/conformance/all_convolutions.py --write"
    table = text.partition(BEGIN)[2].partition(END)[0]
    assert {each.partition("(")[0] for each in VARIANTS} <= {
        line.split("`")[1] for line in table.splitlines() if "`" in line
    }
