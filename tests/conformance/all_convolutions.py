"""Every convolution of PyG with its options, as data, and the table of what trains as in PyG and what is refused.

Run as a program with --write, the table goes into docs/guide/pyg.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("tests", "src", "kernels")]

from conformance.generated_nets import TARGET, build, kwargs_of, split  # noqa: E402 - the paths above
from conformance.plain_loop import STRATEGIES, Verdict, graph, plain, verdict  # noqa: E402

PAGE = ROOT / "docs" / "guide" / "pyg.md"
BEGIN, END = "<!-- convolutions:begin -->", "<!-- convolutions:end -->"

# A line a variant, from 8 to 8 columns: constructor; call, if it is not conv(x, edge_index). w, a, t: with edge_weight,
# edge_attr [E, 4], edge_type. mlp(i, o): two dense layers.
VARIANTS = [
    line.strip()
    for line in """
SimpleConv()
SimpleConv(); w
SimpleConv('mean', combine_root='sum')
SimpleConv('max', combine_root='self_loop')
GCNConv(8, 8)
GCNConv(8, 8); w
GCNConv(8, 8, improved=True)
GCNConv(8, 8, improved=True); w
GCNConv(8, 8, add_self_loops=False)
GCNConv(8, 8, add_self_loops=False); w
GCNConv(8, 8, normalize=False); w
GCNConv(8, 8, cached=True, bias=False)
GCNConv(8, 8, aggr='mean')
GCNConv(8, 8, aggr='max'); w
GCNConv(8, 8, flow='target_to_source')
ChebConv(8, 8, K=1)
ChebConv(8, 8, K=2); w
ChebConv(8, 8, K=3, normalization='rw')
ChebConv(8, 8, K=3, normalization=None); conv(x, edge_index, lambda_max=torch.tensor(2.5))
SAGEConv(8, 8)
SAGEConv(8, 8, aggr='sum', root_weight=False)
SAGEConv(8, 8, aggr='max', normalize=True)
SAGEConv(8, 8, project=True)
SAGEConv(8, 8, aggr='median')
SAGEConv(8, 8, aggr='std')
SAGEConv(8, 8, aggr='mul')
SAGEConv(8, 8, aggr='min')
SAGEConv(8, 8, aggr=['mean', 'max', 'sum'])
SAGEConv(8, 8, aggr='softmax', aggr_kwargs={'learn': True})
SAGEConv(8, 8, aggr='powermean')
SAGEConv(8, 8, aggr='lstm')
SAGEConv((8, 8), 8); conv((x, x.tanh()), edge_index)
SAGEConv((8, 8), 8); conv((x, None), edge_index, size=(x.size(0), x.size(0)))
SAGEConv(8, 8, flow='target_to_source')
GCNConv(8, 8, decomposed_layers=2)
GraphConv(8, 8)
GraphConv(8, 8); w
GraphConv(8, 8, aggr='mean'); w
GraphConv(8, 8, aggr='max'); w
GraphConv((8, 8), 8, bias=False); conv((x, x.tanh()), edge_index, edge_weight)
GatedGraphConv(8, 2)
GatedGraphConv(8, 3, aggr='mean'); w
ResGatedGraphConv(8, 8)
ResGatedGraphConv(8, 8, edge_dim=4); a
ResGatedGraphConv(8, 8, act=nn.Tanh(), root_weight=False, bias=False)
GATConv(8, 4, heads=2)
GATConv(8, 8, heads=3, concat=False)
GATConv(8, 8, add_self_loops=False)
GATConv(8, 8, edge_dim=4); a
GATConv(8, 8, edge_dim=4, fill_value=0.5); a
GATConv(8, 8, edge_dim=4, fill_value='max'); a
GATConv(8, 8, edge_dim=4, add_self_loops=False); a
GATConv(8, 8, negative_slope=0.4, bias=False, residual=True)
GATConv((8, 8), 8, add_self_loops=False); conv((x, x.tanh()), edge_index)
GATConv(8, 8); conv(x, edge_index, return_attention_weights=True)[0]
GATv2Conv(8, 4, heads=2)
GATv2Conv(8, 8, share_weights=True)
GATv2Conv(8, 8, share_weights=True, edge_dim=4, add_self_loops=False); a
GATv2Conv(8, 8, edge_dim=4, fill_value='min'); a
GATv2Conv(8, 8, heads=2, concat=False, residual=True)
GATv2Conv(8, 8, add_self_loops=False, bias=False)
TransformerConv(8, 4, heads=2)
TransformerConv(8, 8, beta=True)
TransformerConv(8, 8, edge_dim=4); a
TransformerConv(8, 8, root_weight=False, heads=2, concat=False)
AGNNConv()
AGNNConv(requires_grad=False)
AGNNConv(add_self_loops=False)
TAGConv(8, 8)
TAGConv(8, 8, K=2); w
TAGConv(8, 8, K=2, normalize=False); w
GINConv(mlp(8, 8))
GINConv(mlp(8, 8), eps=0.3, train_eps=True)
GINConv(mlp(8, 8), aggr='max')
GINEConv(mlp(8, 8), edge_dim=4); a
GINEConv(mlp(8, 8), edge_dim=4, train_eps=True); a
ARMAConv(8, 8)
ARMAConv(8, 8, num_stacks=2, num_layers=2, shared_weights=True)
ARMAConv(8, 8, num_layers=2, act=None); w
SGConv(8, 8)
SGConv(8, 8, K=3); w
SGConv(8, 8, K=2, cached=True)
SGConv(8, 8, K=2, add_self_loops=False)
SSGConv(8, 8, alpha=0.1)
SSGConv(8, 8, alpha=0.3, K=3); w
SSGConv(8, 8, alpha=0.3, K=2, add_self_loops=False)
APPNP(3, 0.1)
APPNP(2, 0.2); w
APPNP(2, 0.2, add_self_loops=False)
APPNP(2, 0.2, normalize=False); w
MFConv(8, 8)
MFConv(8, 8, max_degree=3, bias=False)
RGCNConv(8, 8, 3); t
RGCNConv(8, 8, 3, num_bases=2); t
RGCNConv(8, 8, 3, num_blocks=4, aggr='add'); t
RGCNConv(8, 8, 3, root_weight=False, bias=False); t
RGCNConv(8, 8, 3, aggr='max'); t
RGCNConv(8, 8, 3); conv(x, edge_index, edge_type * 0)
FastRGCNConv(8, 8, 3); t
FastRGCNConv(8, 8, 3, num_bases=2, aggr='sum'); t
RGATConv(8, 8, 3); t
RGATConv(8, 4, 3, heads=2, mod='additive'); t
RGATConv(8, 8, 3, attention_mechanism='within-relation', attention_mode='multiplicative-self-attention'); t
RGATConv(8, 8, 3, edge_dim=4, num_bases=2); conv(x, edge_index, edge_type, edge_attr)
SignedConv(8, 4, first_aggr=True); conv(x, edge_index, edge_index.flip(0))
SignedConv(4, 4, first_aggr=False); conv(x, edge_index, edge_index.flip(0))
DNAConv(8); conv(torch.stack([x, x.tanh()], 1), edge_index)
DNAConv(8, heads=2, groups=2); conv(torch.stack([x, x.tanh()], 1), edge_index)
DNAConv(8, add_self_loops=False); conv(torch.stack([x, x.tanh()], 1), edge_index, edge_weight)
PointNetConv(mlp(11, 8), mlp(8, 8)); conv(x, x[:, :3], edge_index)
PointNetConv(mlp(11, 8), add_self_loops=False); conv(x, x[:, :3], edge_index)
GMMConv(8, 8, dim=4, kernel_size=2); a
GMMConv(8, 8, dim=4, kernel_size=2, separate_gaussians=True, aggr='add'); a
SplineConv(8, 8, dim=4, kernel_size=2); a
NNConv(8, 8, mlp(4, 64)); a
NNConv(8, 8, mlp(4, 64), aggr='mean', root_weight=False, bias=False); a
NNConv(8, 8, mlp(4, 64), aggr='max'); a
CGConv(8)
CGConv(8, dim=4); a
CGConv(8, dim=4, aggr='mean', batch_norm=True); a
EdgeConv(mlp(16, 8))
EdgeConv(mlp(16, 8), aggr='mean')
EdgeConv(lambda rows: rows[:, :8] * rows[:, 8:])
DynamicEdgeConv(mlp(16, 8), k=3); conv(x)
GravNetConv(8, 8, 3, 4, k=3); conv(x)
XConv(8, 8, dim=3, kernel_size=3); conv(x, x[:, :3])
PPFConv(mlp(12, 8)); conv(x, x[:, :3], F.normalize(x[:, 3:6]), edge_index)
PPFConv(mlp(12, 8), mlp(8, 8), add_self_loops=False); conv(x, x[:, :3], F.normalize(x[:, 3:6]), edge_index)
FeaStConv(8, 8)
FeaStConv(8, 8, heads=2, add_self_loops=False)
PointTransformerConv(8, 8); conv(x, x[:, :3], edge_index)
PointTransformerConv(8, 8, add_self_loops=False, attn_nn=mlp(8, 8)); conv(x, x[:, :3], edge_index)
HypergraphConv(8, 8)
HypergraphConv(8, 8, bias=False); w
LEConv(8, 8)
LEConv(8, 8); w
PNAConv(8, 8, ['mean', 'max', 'std'], ['identity', 'amplification'], DEG)
PNAConv(8, 8, ['sum', 'min', 'var'], ['attenuation', 'linear'], DEG, towers=2, divide_input=True)
PNAConv(8, 8, ['mean'], ['identity', 'linear'], DEG, edge_dim=4, pre_layers=2, post_layers=2); a
PNAConv(8, 8, ['mean'], ['amplification'], DEG, train_norm=True)
ClusterGCNConv(8, 8)
ClusterGCNConv(8, 8, diag_lambda=0.5)
GENConv(8, 8, norm='layer')
GENConv(8, 8, aggr='powermean', learn_p=True, norm=None)
GENConv(8, 8, learn_t=True, msg_norm=True, learn_msg_scale=True, norm='layer')
GENConv(8, 8, edge_dim=4, norm='layer'); a
GENConv(8, 8, norm='batch')
GCN2Conv(8, 0.1); conv(x, x.tanh(), edge_index)
GCN2Conv(8, 0.1, theta=0.5, layer=2, shared_weights=False); conv(x, x.tanh(), edge_index, edge_weight)
GCN2Conv(8, 0.1, add_self_loops=False); conv(x, x.tanh(), edge_index)
GCN2Conv(8, 0.1, normalize=False); conv(x, x.tanh(), edge_index, edge_weight)
PANConv(8, 8, 2); conv(x, edge_index)[0]
WLConvContinuous()
WLConvContinuous(); w
FiLMConv(8, 8)
FiLMConv(8, 8, num_relations=3); t
FiLMConv(8, 8, act=None, aggr='max')
SuperGATConv(8, 4, heads=2, add_self_loops=False)
SuperGATConv(8, 8, attention_type='SD')
FAConv(8); conv(x, x.tanh(), edge_index)
FAConv(8, eps=0.3, add_self_loops=False); conv(x, x.tanh(), edge_index)
FAConv(8, normalize=False); conv(x, x.tanh(), edge_index, edge_weight)
EGConv(8, 8, num_heads=4, num_bases=2)
EGConv(8, 8, ['sum', 'max', 'std'], num_heads=2, add_self_loops=False)
PDNConv(8, 8, edge_dim=4, hidden_channels=8); a
PDNConv(8, 8, edge_dim=4, hidden_channels=8, add_self_loops=False, normalize=False); a
GeneralConv(8, 8)
GeneralConv(8, 8, in_edge_channels=4, heads=2, attention=True); a
GeneralConv(8, 8, attention=True, attention_type='dot_product', skip_linear=True, l2_normalize=True)
GeneralConv(8, 8, directed_msg=False, aggr='max')
HEATConv(8, 8, 2, 3, 4, 4, 4); conv(x, edge_index, (x[:, 0] > 0).long(), edge_type, edge_attr)
HEATConv(8, 4, 2, 3, 4, 4, 4, heads=2); conv(x, edge_index, (x[:, 0] > 0).long(), edge_type, edge_attr)
LGConv()
LGConv(); w
LGConv(normalize=False); w
PointGNNConv(mlp(8, 3), mlp(11, 8), mlp(8, 8)); conv(x, x[:, :3], edge_index)
GPSConv(8, SAGEConv(8, 8), heads=2, norm=None)
GPSConv(8, SAGEConv(8, 8), heads=2, norm='layer_norm', attn_type='performer')
GPSConv(8, None, heads=2, norm=None)
AntiSymmetricConv(8)
AntiSymmetricConv(8, num_iters=2, act='relu'); w
AntiSymmetricConv(8, SAGEConv(8, 8))
DirGNNConv(SAGEConv(8, 8))
DirGNNConv(GCNConv(8, 8), alpha=0.3, root_weight=False)
DirGNNConv(GATConv(8, 8, add_self_loops=False))
MixHopConv(8, 4, powers=[0, 1])
MixHopConv(8, 4, powers=[1, 2]); w
MixHopConv(8, 4, powers=[0, 2], add_self_loops=False)
MeshCNNConv(8, 8)
""".splitlines()
    if line.strip()
]
SAMPLE = VARIANTS[::9]


def verdicts(variant: str, *, strategies: tuple[str, ...] = tuple(STRATEGIES)) -> dict[str, Verdict]:
    """By strategy, the worse of a clean and a dirty graph; none where PyG itself cannot run it."""
    found: dict[str, Verdict] = {}
    spec = {"layers": [{"conv": variant}], "seed": 1}
    for dirty in (False, True):
        data = graph(seed=int(dirty), dirty=dirty, edges=split(variant)[2])
        try:
            due = plain(lambda: build(**kwargs_of(spec)), data)
        except (ImportError, ValueError, RuntimeError, AttributeError, IndexError, TypeError):
            continue
        for strategy in strategies:
            world = 1 if strategy in ("single", "gnnpipe") else 2
            now = verdict(TARGET, kwargs_of(spec), data, strategy, world, due)
            if strategy not in found or found[strategy].kind == "equal" or not now.good:
                found[strategy] = now
    return found


def table(strategies: tuple[str, ...] = tuple(STRATEGIES)) -> str:
    """Markdown: a row a convolution, in a cell the number of its variants that are equal, if not all are."""
    rows: dict[str, list[dict[str, Verdict]]] = {}
    for variant in VARIANTS:
        rows.setdefault(variant.partition("(")[0], []).append(verdicts(variant, strategies=strategies))
    lines = [f"| convolution | variants | {' | '.join(strategies)} |", f"|{'---|' * (len(strategies) + 2)}"]
    for name, found in rows.items():
        cells = [_cell([each[strategy] for each in found if each], len(found)) for strategy in strategies]
        lines.append(f"| `{name}` | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: list[Verdict], variants: int) -> str:
    if not found:
        return "not tried: PyG lacks a package"
    counts = Counter(each.kind for each in found)
    if set(counts) == {"equal"} and len(found) == variants:
        return "equal"
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def main() -> None:
    page, made = PAGE.read_text(), table()
    print(made)
    if "--write" in sys.argv:
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{made}\n{END}{rest.partition(END)[2]}")


if __name__ == "__main__":
    main()
