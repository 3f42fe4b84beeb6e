"""Jumping knowledge over convolutions of three kinds, as a PyG user writes it; halo rows are an epoch old.

python examples/jumping.py, or on two ranks: torchrun --master-port 29500 --nproc-per-node 2 examples/jumping.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import GCNConv, GINConv, JumpingKnowledge, SAGEConv

import gnnpar


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, hidden=16):
        super().__init__()
        mlp = nn.Sequential(nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, hidden))
        self.convs = nn.ModuleList(
            [GCNConv(in_channels, hidden), GINConv(mlp, train_eps=True), SAGEConv(hidden, hidden)]
        )
        self.jump, self.last = JumpingKnowledge("cat"), nn.Linear(3 * hidden, out_channels)

    def forward(self, x, edge_index):
        found = []
        for conv in self.convs:
            x = F.dropout(conv(x, edge_index).relu(), p=0.3, training=self.training)
            found.append(x)
        return self.last(self.jump(found))


def main() -> None:
    seed_everything(0)
    data = FakeDataset(1, avg_num_nodes=200, avg_degree=6, num_channels=16, num_classes=4)[0]
    with gnnpar.distribute(Net, data, strategy="pipegcn", dataset={"split": "random"}) as session:
        optimizer = torch.optim.Adam(session.parameters(), lr=0.01)
        losses = [session.train_epoch(optimizer) for _ in range(10)]
        metrics = session.evaluate()
        if session.rank == 0:
            print(f"{session.world_size} ranks, loss {losses[0]:.3f} -> {losses[-1]:.3f}, test {metrics['test']:.3f}")


if __name__ == "__main__":
    main()
