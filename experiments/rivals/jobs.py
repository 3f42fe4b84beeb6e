"""What `rivals` runs, as data: variants of each method, studies over seeds, graphs and cuts whose bytes are counted."""

from collections.abc import Mapping, Sequence

Jobs = Mapping[str, Sequence[str]]  # name -> overrides

BASE = {"exact": ["strategy=graph_parallel"], "control": ["strategy=graph_parallel", "codec=drop"]}
SLOW = ["optim.lr=0.001"]
PIPEGCN = {
    "pipegcn": [],
    "pipegcn features": ["strategy.smooth_features=true"],
    "pipegcn gradients": ["strategy.smooth_gradients=true"],
    "pipegcn both": ["strategy.smooth_features=true", "strategy.smooth_gradients=true"],
    "pipegcn k=2": ["strategy.staleness=2"],
    "pipegcn k=4": ["strategy.staleness=4"],
    "pipegcn lr/10": SLOW,
}
BNS = {f"bns {rate}": [f"strategy.rate={rate}"] for rate in (0.5, 0.1, 0.01)}
SANCUS = {
    **{f"sancus k={k}": [f"strategy.period={k}"] for k in (2, 4, 8)},
    **{f"sancus e={e}": ["strategy.period=null", f"strategy.bound={e}"] for e in (0.05, 0.1, 0.2, 0.5)},
}
DIGEST = {
    **{f"digest k={k}": [f"strategy.period={k}"] for k in (1, 5, 10, 20)},
    "digest k=5 gradients": ["strategy.period=5", "strategy.gradients=true"],
}
COFREE = {
    "cofree": [],
    "cofree copies": ["strategy.reweight=copies"],
    "cofree none": ["strategy.reweight=none"],
    "cofree graph degrees": ["strategy.degrees=graph"],
    "cofree ne": ["partition=ne"],
    "cofree ne none": ["partition=ne", "strategy.reweight=none"],
    "cofree P=2": ["world_size=2"],
    "cofree P=2 none": ["world_size=2", "strategy.reweight=none"],
    "cofree P=8": ["world_size=8"],
    "cofree P=8 none": ["world_size=8", "strategy.reweight=none"],
}
MINIBATCH = {
    "minibatch": ["strategy=minibatch"],
    "minibatch cluster": ["strategy=minibatch", "strategy.sampler=cluster", "strategy.normalize=subgraph"],
    "minibatch saint": ["strategy=minibatch", "strategy.sampler=saint"],
    "minibatch saint subgraph": ["strategy=minibatch", "strategy.sampler=saint", "strategy.normalize=subgraph"],
}
METHODS = {"pipegcn": PIPEGCN, "bns": BNS, "sancus": SANCUS, "digest": DIGEST, "cofree": COFREE}
VARIANTS: Jobs = {
    **BASE,
    "exact lr/10": [*BASE["exact"], *SLOW],
    **{
        name: [f"strategy={method}", *overrides] for method, jobs in METHODS.items() for name, overrides in jobs.items()
    },
    **MINIBATCH,
}
MAIN = (
    "exact",
    "control",
    "pipegcn",
    "pipegcn both",
    "bns 0.1",
    "bns 0.01",
    "sancus k=4",
    "digest k=10",
    "cofree",
    "cofree none",
    "minibatch cluster",
    "minibatch saint",
)
UNSETTLED = ("exact", "control", "pipegcn", "bns 0.1", "digest k=10", "cofree", "cofree none")  # GCN, after 150 epochs

RANKS = ["world_size=4", "comm=threads", "threads_per_rank=1", "fidelity_every=25", "eval_every=5"]
CLASSIC = ["model.hidden=64", "optim.weight_decay=5e-4"]
# study -> folder of its raw files, variants, overrides. GraphSAGE is the model of PipeGCN's and BNS-GCN's tables.
# Raw counts of words need a norm: GraphSAGE does not train on Computers without.
SBM = ["dataset=sbm", "model.num_layers=3", "model.hidden=64", *RANKS, "epochs=150"]
LONG = [*SBM[:-1], "epochs=400"]  # those that 150 epochs do not settle
STUDIES: Mapping[str, tuple[str, Sequence[str], Sequence[str]]] = {
    "sbm sage": ("", tuple(VARIANTS), ["model=sage", *SBM]),
    "sbm sage long": ("", ("exact", "control", "pipegcn", "pipegcn both", "bns 0.1"), ["model=sage", *LONG]),
    "sbm gcn": ("", MAIN, ["model=gcn", *SBM]),
    "sbm gcn long": ("", UNSETTLED, ["model=gcn", *LONG]),
    "computers sage": (
        "Computers",
        MAIN,
        [
            "dataset=computers",
            "dataset.split_seed=null",
            "model=sage",
            "model.norm=layer",
            *CLASSIC,
            *RANKS,
            "epochs=100",
        ],
    ),
    "tolokers gcn": (
        "tolokers",
        MAIN,
        ["dataset=tolokers", "dataset.split_index=null", "model=gcn", *CLASSIC, *RANKS, "epochs=150"],
    ),
}

# graph -> folder of its raw files, overrides: from hardly cut to dense, and two with hubs
GRAPHS: Mapping[str, tuple[str, Sequence[str]]] = {
    "cora": ("Cora", ["dataset=cora"]),
    "computers": ("Computers", ["dataset=computers"]),
    "debian": ("debian", ["dataset=npz", "dataset.path={runs}/debian.npz"]),
    "squirrel": ("Squirrel", ["dataset=squirrel"]),
    "tolokers": ("tolokers", ["dataset=tolokers"]),
    "sbm": ("", ["dataset=sbm", "dataset.num_features=64"]),
    "sbm_reddit": ("", ["dataset=sbm_reddit"]),
}
CUTS = ("metis", "random")
SENDERS = ("graph_parallel", "feature", "cagnet")
COUNTED = [
    "model=sage",
    "model.hidden=64",
    "model.num_layers=3",
    "first_layer=cached",  # else the width of a graph's features decides
    "comm=threads",
    "threads_per_rank=1",
    "epochs=2",
    "eval_every=2",
    "seed=0",
]

SHAPE = ["dataset=sbm", "dataset.num_nodes=20000", "dataset.num_features=128", "model=sage", "model.num_layers=3"]
LARGE = [*SHAPE, "model.hidden=128", "threads_per_rank=1", "seed=0"]
HELD: Jobs = {
    "graph_parallel": ["strategy=graph_parallel"],
    "pipegcn": ["strategy=pipegcn"],
    "pipegcn both": ["strategy=pipegcn", *PIPEGCN["pipegcn both"]],
    **{f"bns {rate}": ["strategy=bns", f"strategy.rate={rate}"] for rate in (1, 0.5, 0.1, 0.01, 0)},
    "feature": ["strategy=feature"],
    "cagnet": ["strategy=cagnet"],
    "cagnet c=2": ["strategy=cagnet", "strategy.replication=2"],
    "sancus": ["strategy=sancus"],
    "digest": ["strategy=digest", "strategy.period=2"],
    "cofree": ["strategy=cofree"],
    "cofree ne": ["strategy=cofree", "partition=ne"],
    "minibatch cluster": MINIBATCH["minibatch cluster"],
}
TIMED: Jobs = {
    "vanilla": ["strategy=graph_parallel", "strategy.overlap=none"],
    "graph_parallel": ["strategy=graph_parallel"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
    "control": BASE["control"],
    "pipegcn": ["strategy=pipegcn"],
    "pipegcn bf16": ["strategy=pipegcn", "codec=bf16"],
    "bns 0.1": ["strategy=bns", "strategy.rate=0.1"],
    "bns 0.01": ["strategy=bns", "strategy.rate=0.01"],
    "feature": ["strategy=feature"],
    "cagnet": ["strategy=cagnet"],
    "sancus k=4": ["strategy=sancus", "strategy.period=4"],
    "digest k=5": ["strategy=digest", "strategy.period=5"],
    "cofree": ["strategy=cofree"],
}
