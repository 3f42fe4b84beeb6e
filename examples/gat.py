"""GAT with attention dropout, as a PyG user writes it; SAR never holds the rows of all neighbours.

python examples/gat.py, or on two ranks: torchrun --master-port 29500 --nproc-per-node 2 examples/gat.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GATConv

import gnnpar


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, hidden=8, heads=4):
        super().__init__()
        self.conv1 = GATConv(in_channels, hidden, heads=heads, dropout=0.3)
        self.conv2 = GATConv(heads * hidden, out_channels, heads=1, concat=False, dropout=0.3)

    def forward(self, x, edge_index):
        x = F.dropout(x, p=0.3, training=self.training)
        return self.conv2(F.elu(self.conv1(x, edge_index)), edge_index)


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
