"""R-GCN as a user of PyG writes it: `model=pyg model.target=nets.RGCN`."""

import itertools

import torch.nn.functional as F
from torch import Tensor, nn
from torch_geometric.nn import RGCNConv


class RGCN(nn.Module):
    """Shapes: x [N, in_channels], edge_index [2, E], edge_type [E] -> [N, out_channels]."""

    def __init__(
        self, in_channels: int, hidden_channels: int, num_layers: int, out_channels: int, num_relations: int, p: float
    ) -> None:
        super().__init__()
        widths = [in_channels, *[hidden_channels] * (num_layers - 1), out_channels]
        self.convs = nn.ModuleList(RGCNConv(a, b, num_relations) for a, b in itertools.pairwise(widths))
        self.p = p

    def forward(self, x: Tensor, edge_index: Tensor, edge_type: Tensor) -> Tensor:
        for conv in self.convs[:-1]:
            x = F.dropout(conv(x, edge_index, edge_type).relu(), self.p, self.training)
        return self.convs[-1](x, edge_index, edge_type)
