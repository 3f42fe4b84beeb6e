"""R-GCN on a HeteroData, as a PyG user writes it: the types of its edges are the relations.

python examples/rgcn.py, or on two ranks: torchrun --master-port 29500 --nproc-per-node 2 examples/rgcn.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.datasets import FakeHeteroDataset
from torch_geometric.nn import RGCNConv

import gnnpar


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, num_relations, hidden=16):
        super().__init__()
        self.encoder = nn.Linear(in_channels, hidden)  # one for each type of nodes, whose columns are its own
        self.conv1 = RGCNConv(hidden, hidden, num_relations, num_bases=3)
        self.conv2 = RGCNConv(hidden, out_channels, num_relations)

    def forward(self, x, edge_index, edge_type):
        x = F.dropout(self.encoder(x).relu(), p=0.3, training=self.training)
        return self.conv2(self.conv1(x, edge_index, edge_type).relu(), edge_index, edge_type)


def main() -> None:
    seed_everything(0)
    data = FakeHeteroDataset(1, num_node_types=3, num_edge_types=5, avg_num_nodes=200, num_classes=4, edge_dim=0)[0]
    options = {"split": "random", "self_loops": False}  # a loop that is added would have no type
    with gnnpar.distribute(Net, data, strategy="sar", dataset=options) as session:
        optimizer = torch.optim.Adam(session.parameters(), lr=0.01)
        losses = [session.train_epoch(optimizer) for _ in range(10)]
        metrics = session.evaluate()
        if session.rank == 0:
            print(f"{session.world_size} ranks, loss {losses[0]:.3f} -> {losses[-1]:.3f}, test {metrics['test']:.3f}")


if __name__ == "__main__":
    main()
