"""The source of a model of one layer, for tests that write it into a file of the user's."""

NET = """
import torch
class Net(torch.nn.Module):
    def __init__(self, in_channels, out_channels):
        super().__init__()
        self.lin = torch.nn.Linear(in_channels, out_channels)
    def forward(self, x, edge_index):
        return self.lin(x)
"""
