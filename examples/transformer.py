"""TransformerConv, as a PyG user writes it.

python examples/transformer.py, or on two ranks: torchrun --master-port 29500 --nproc-per-node 2 examples/transformer.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeDataset
from torch_geometric.nn import TransformerConv

import gnnpar


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, hidden=8, heads=2):
        super().__init__()
        self.conv1 = TransformerConv(in_channels, hidden, heads=heads, dropout=0.1)
        self.norm = nn.LayerNorm(heads * hidden)
        self.conv2 = TransformerConv(heads * hidden, out_channels, heads=1, beta=True)

    def forward(self, x, edge_index):
        return self.conv2(F.relu(self.norm(self.conv1(x, edge_index))), edge_index)


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
