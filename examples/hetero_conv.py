"""HeteroConv on a HeteroData, as a PyG user writes it: a convolution for each type of edges.

python examples/hetero_conv.py, or on two ranks: torchrun --master-port 29500 --nproc-per-node 2 examples/hetero_conv.py
"""

import torch
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeHeteroDataset
from torch_geometric.nn import GATConv, HeteroConv, Linear, SAGEConv

import gnnpar


class Net(nn.Module):
    def __init__(self, metadata, out_channels, hidden=16):
        super().__init__()
        self.convs = nn.ModuleList()
        for _ in range(2):
            convs = {}
            for source, relation, destination in metadata[1]:
                if source == destination:
                    conv = GATConv((-1, -1), hidden // 2, heads=2, add_self_loops=False)
                else:
                    conv = SAGEConv((-1, -1), hidden)
                convs[source, relation, destination] = conv
            self.convs.append(HeteroConv(convs, aggr="sum"))
        self.target = metadata[0][0]
        self.drop, self.lin = nn.Dropout(0.3), Linear(hidden, out_channels)

    def forward(self, x_dict, edge_index_dict):
        for conv in self.convs:
            x_dict = {key: self.drop(x.relu()) for key, x in conv(x_dict, edge_index_dict).items()}
        return self.lin(x_dict[self.target])


def main() -> None:
    seed_everything(0)
    data = FakeHeteroDataset(1, num_node_types=3, num_edge_types=6, avg_num_nodes=200, num_classes=4, edge_dim=0)[0]
    options = {"split": "random", "self_loops": "keep"}  # the edges as they are
    with gnnpar.distribute(Net, data, strategy="graph_parallel", dataset=options) as session:
        optimizer = torch.optim.Adam(session.parameters(), lr=0.01)
        losses = [session.train_epoch(optimizer) for _ in range(10)]
        metrics = session.evaluate()
        if session.rank == 0:
            print(f"{session.world_size} ranks, loss {losses[0]:.3f} -> {losses[-1]:.3f}, test {metrics['test']:.3f}")


if __name__ == "__main__":
    main()
