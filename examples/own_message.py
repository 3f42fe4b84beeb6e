"""A convolution with a message of its own, as a PyG user writes it.

python examples/own_message.py, or on two ranks: torchrun --master-port 29500 --nproc-per-node 2 examples/own_message.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import MessagePassing

import gnnpar


class Gated(MessagePassing):
    """Neighbours' rows, each through a gate that both ends open."""

    def __init__(self, in_channels, out_channels):
        super().__init__(aggr="mean")
        self.lin, self.gate = nn.Linear(in_channels, out_channels), nn.Linear(2 * out_channels, out_channels)

    def forward(self, x, edge_index):
        x = self.lin(x)
        return x + self.propagate(edge_index, x=x)

    def message(self, x_i, x_j):
        return torch.sigmoid(self.gate(torch.cat([x_i, x_j], dim=-1))) * x_j


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, hidden=16):
        super().__init__()
        self.conv1, self.conv2 = Gated(in_channels, hidden), Gated(hidden, out_channels)

    def forward(self, x, edge_index):
        x = F.dropout(self.conv1(x, edge_index).relu(), p=0.5, training=self.training)
        return self.conv2(x, edge_index)


def main() -> None:
    seed_everything(0)
    data = FakeDataset(1, avg_num_nodes=200, avg_degree=6, num_channels=16, num_classes=4)[0]
    with gnnpar.distribute(Net, data, strategy="sar", dataset={"split": "random"}) as session:
        optimizer = torch.optim.Adam(session.parameters(), lr=0.01)
        losses = [session.train_epoch(optimizer) for _ in range(10)]
        metrics = session.evaluate()
        if session.rank == 0:
            print(f"{session.world_size} ranks, loss {losses[0]:.3f} -> {losses[-1]:.3f}, test {metrics['test']:.3f}")


if __name__ == "__main__":
    main()
