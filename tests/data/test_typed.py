"""sbm_typed: types say which signature a topic stands for, and some pairs of nodes have several."""

import numpy as np
import pytest
import torch

from gnnpar.config.compose import compose
from gnnpar.data.typed import TypedSBM, generate


def test_debian_adds_no_self_loops_which_have_no_type() -> None:
    assert compose(["dataset=debian", "model=rgcn"]).resolved["dataset"]["self_loops"] is False


def test_edges_of_two_types_between_two_nodes_are_two_edges() -> None:
    data = TypedSBM(several=0.2).load(None, 0)
    pairs, counts = torch.unique(data.edge_index, dim=1, return_counts=True)
    assert pairs.shape[1] == 20_000
    assert data.num_edges == 20_000 + int((counts == 2).sum())
    assert int((counts == 2).sum()) == pytest.approx(4000, rel=0.1)
    assert data.edge_sizes.types == 4
    same = (data.edge_index[:, 1:] == data.edge_index[:, :-1]).all(0)
    assert data.edges.type is not None
    assert bool((data.edges.type[1:] > data.edges.type[:-1])[same].all())


def test_a_type_is_the_topic_less_the_signature() -> None:
    """Features without noise show topic and signature."""
    config = TypedSBM(feature_noise=0.0, group_signal=0.0, leak_signal=1.0, topic_signal=2.0, several=0.0)
    raw = generate(config, seed=0)
    assert raw.edges.type is not None
    signature = raw.y.numpy() % 4
    shown = np.unique(raw.x.numpy().round(4), axis=0, return_inverse=True)[1].reshape(-1)
    assert len(np.unique(shown)) == 16, "four topics of four signatures"
    src, dst = raw.edge_index.numpy()
    votes = np.zeros((16, 4))  # of what a source shows, for its topic
    np.add.at(votes, (shown[src], (raw.edges.type.numpy() + signature[dst]) % 4), 1)
    share = votes.max(1) / votes.sum(1)
    assert share.min() > 0.25 + 0.75 * 0.2, "a quarter of the edges, those between the sides, agree on it"


@pytest.mark.parametrize(
    ("nodes", "line"),
    [(16, "distinct edges fit among 16 nodes; lower"), (100_000_000_000, "GiB at least, this machine has")],
)
def test_graph_beyond_its_pairs_or_the_memory_is_refused(nodes: int, line: str) -> None:
    with pytest.raises(ValueError, match=line):
        TypedSBM(num_nodes=nodes).load(None, 0)
