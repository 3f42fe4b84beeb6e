"""Link prediction with GraphSAGE rows and an MLP decoder, as a PyG user writes the encoder.

python examples/link.py, or on two ranks: torchrun --master-port 29500 --nproc-per-node 2 examples/link.py
"""

import torch
from torch import nn
from torch_geometric import seed_everything
from torch_geometric.data import Data
from torch_geometric.nn import SAGEConv
from torch_geometric.utils import stochastic_blockmodel_graph

import gnnpar


class Net(nn.Module):
    def __init__(self, in_channels, out_channels, hidden=32):
        super().__init__()
        self.conv1 = SAGEConv(in_channels, hidden)
        self.conv2 = SAGEConv(hidden, out_channels)

    def forward(self, x, edge_index):
        return self.conv2(self.conv1(x, edge_index).relu(), edge_index)


def main() -> None:
    seed_everything(0)
    blocks, dense = [50] * 4, 0.3 * torch.eye(4)
    x = torch.eye(4).repeat_interleave(50, dim=0) @ torch.randn(4, 16) + torch.randn(200, 16)
    data = Data(x=x, edge_index=stochastic_blockmodel_graph(blocks, dense + 0.01))
    options = {"task.decoder": "mlp", "task.width": 32}
    with gnnpar.distribute(Net, data, strategy="graph_parallel", task="link", **options) as session:
        optimizer = torch.optim.Adam(session.parameters(), lr=0.01)
        losses = [session.train_epoch(optimizer) for _ in range(20)]
        metrics = session.evaluate()
        if session.rank == 0:
            print(f"{session.world_size} ranks, loss {losses[0]:.3f} -> {losses[-1]:.3f}, test {metrics['test']:.3f}")


if __name__ == "__main__":
    main()
