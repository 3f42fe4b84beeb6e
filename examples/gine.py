"""GIN with attributes of edges, as a PyG user writes it.

python examples/gine.py, or on two ranks: torchrun --master-port 29500 --nproc-per-node 2 examples/gine.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GINEConv

import gnnpar


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, edge_dim, hidden=16):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(edge_dim, hidden), nn.ReLU())
        self.conv1 = GINEConv(nn.Linear(in_channels, hidden), edge_dim=hidden, train_eps=True)
        self.conv2 = GINEConv(nn.Linear(hidden, out_channels), train_eps=True)

    def forward(self, x, edge_index, edge_attr):
        edge = self.encoder(edge_attr)
        x = F.dropout(self.conv1(x, edge_index, edge).relu(), p=0.5, training=self.training)
        return self.conv2(x, edge_index, edge)


def main() -> None:
    seed_everything(0)
    data = FakeDataset(1, avg_num_nodes=200, avg_degree=6, num_channels=16, num_classes=4, edge_dim=3)[0]
    options = {"split": "random", "self_loops": False}  # a loop that is added would have no attributes
    with gnnpar.distribute(Net, data, strategy="graph_parallel", dataset=options) as session:
        optimizer = torch.optim.Adam(session.parameters(), lr=0.01)
        losses = [session.train_epoch(optimizer) for _ in range(10)]
        metrics = session.evaluate()
        if session.rank == 0:
            print(f"{session.world_size} ranks, loss {losses[0]:.3f} -> {losses[-1]:.3f}, test {metrics['test']:.3f}")


if __name__ == "__main__":
    main()
