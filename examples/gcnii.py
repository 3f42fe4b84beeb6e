"""GCNII of 16 layers, as a PyG user writes it.

python examples/gcnii.py, or on two ranks: torchrun --master-port 29500 --nproc-per-node 2 examples/gcnii.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GCN2Conv

import gnnpar


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, hidden=16, layers=16):
        super().__init__()
        self.first, self.last = nn.Linear(in_channels, hidden), nn.Linear(hidden, out_channels)
        self.convs = nn.ModuleList(GCN2Conv(hidden, alpha=0.1, theta=0.5, layer=i + 1) for i in range(layers))

    def forward(self, x, edge_index):
        x = first = self.first(x).relu()
        for conv in self.convs:
            x = conv(F.dropout(x, p=0.3, training=self.training), first, edge_index).relu()
        return self.last(x)


def main() -> None:
    seed_everything(0)
    data = FakeDataset(1, avg_num_nodes=200, avg_degree=6, num_channels=16, num_classes=4)[0]
    with gnnpar.distribute(Net, data, strategy="graph_parallel", dataset={"split": "random"}) as session:
        optimizer = torch.optim.Adam(session.parameters(), lr=0.01)
        losses = [session.train_epoch(optimizer) for _ in range(10)]
        metrics = session.evaluate()
        if session.rank == 0:
            print(f"{session.world_size} ranks, loss {losses[0]:.3f} -> {losses[-1]:.3f}, test {metrics['test']:.3f}")


if __name__ == "__main__":
    main()
