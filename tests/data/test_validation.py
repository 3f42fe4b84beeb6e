"""Every graph that enters is checked; each mistake is one line with the numbers and what to change."""

import pytest
import torch

from data.samples import raw_graph
from gnnpar.data import Preprocess, prepare

NAN = torch.tensor([[0.0, 1.0]] * 4 + [[float("nan"), 2.0], [float("inf"), 0.0]])
ALL = torch.ones(6)
INTEGERS = torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": NAN}, "features hold 1 NaN and 1 infinite values of 12 .first at node 4, feature 0.; replace them"),
        ({"x": torch.full((6, 1), 1e300, dtype=torch.float64)}, "features hold 0 NaN and 6 infinite"),
        ({"x": torch.ones(6)}, r"features must be \[nodes, features\].*got shape \[6\]"),
        ({"x": torch.ones(0, 3)}, r"got shape \[0, 3\]"),
        ({"x": torch.ones(4, 2)}, r"labels of a single_label task must have shape \[4\], got \[6\]|outside nodes 0..3"),
        (
            {"edge_index": torch.tensor([[0, 6], [1, 2]])},
            "1 of 2 edges point outside nodes 0..5 .ids range from 0 to 6",
        ),
        ({"edge_index": torch.tensor([[0, -1], [1, 2]])}, "1 of 2 edges point outside nodes 0..5 .ids range from -1"),
        ({"edge_index": torch.ones(3, 2).long()}, r"must have shape \[2, edges\], got \[3, 2\]; transpose"),
        ({"edge_index": torch.tensor([[0.0], [1.0]])}, "edge_index is torch.float32; node ids must be integers"),
        ({"y": torch.tensor([0, 1, 2, 0, 1])}, r"must have shape \[6\], got \[5\]"),
        ({"y": torch.tensor([0, 1, 2, 0, 1, -3])}, "1 labels lie outside 0..2 .they range from -3 to 2"),
        ({"y": torch.tensor([0, 1, 2, 0, 1, 0]), "task": "binary"}, "1 labels lie outside 0..1"),
        ({"y": torch.full((6,), -1)}, "no node has a label"),
        ({"y": torch.tensor([0.5, 1, 2, 0, 1, 0])}, "1 labels are not whole numbers"),
        ({"y": INTEGERS, "task": "multi_label"}, r"must have shape \[6, classes\] of 0/1, got \[6\]"),
        ({"y": INTEGERS[:, None].repeat(1, 2), "task": "multi_label"}, "4 multi-label entries are neither 0 nor 1"),
        ({"masks": (0 * ALL, ALL, 0 * ALL)}, "the training split is empty .train/val/test = 0/6/0"),
        ({"masks": (ALL, torch.eye(6)[0], 0 * ALL)}, "1 nodes are in both the train and the val split"),
        ({"masks": (ALL[:5], ALL, ALL)}, r"train_mask must be \[6\].*got \[5\]"),
        ({"masks": (3 * ALL.long(), ALL, ALL)}, "train_mask is torch.int64 with values other"),
        ({"masks": None}, "has no split of its own; set dataset.split=random"),
        ({"y": torch.tensor([-1, 1, 2, 0, 1, 2])}, "1 nodes of the train split have no label"),
    ],
)
def test_a_bad_graph_is_one_clear_line(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        prepare(raw_graph(**change), Preprocess(), seed=0)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("dataset tiny")


@pytest.mark.parametrize("how", ["given", "both"])
def test_a_graph_without_features_is_refused_unless_they_are_learned(how):
    dataset = prepare(raw_graph(x=torch.ones(6, 0)), Preprocess(), seed=0)
    with pytest.raises(ValueError, match="dataset tiny: the graph has no features: features=learned gives each node"):
        dataset.with_features(how, 5, 0)
    assert dataset.with_features("learned", 5, 0).num_features == 5


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"split": "per_class"}, "class 0 has 2 nodes, fewer than .* = 50; lower them or set dataset.split=random"),
        ({"split": "random", "train_fraction": 0.8, "val_fraction": 0.4}, "add up to more than 1"),
    ],
)
def test_an_impossible_split_is_one_clear_line(fields, message):
    with pytest.raises(ValueError, match=message):
        prepare(raw_graph(), Preprocess(**fields), seed=0)


def test_what_is_unusual_but_fine_enters():
    no_edges = prepare(raw_graph(edge_index=torch.zeros(2, 0, dtype=torch.int64)), Preprocess(self_loops=False), seed=0)
    assert no_edges.num_edges == 0
    assert no_edges.in_degree.tolist() == [0] * 6
    nan_label = prepare(
        raw_graph(y=torch.tensor([[0.0], [1], [2], [0], [1], [float("nan")]]), masks=None), RANDOM, seed=0
    )
    assert nan_label.y.tolist() == [0, 1, 2, 0, 1, -1]
    assert prepare(raw_graph(x=torch.ones(6, 2, dtype=torch.uint8)), Preprocess(), seed=0).x.dtype == torch.float32


RANDOM = Preprocess(split="random")
