"""What compare_all runs, as data: who is compared, on what, how often. `rehearsal` is the same in small."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

BASELINES = {
    "single": ["strategy=single"],
    "vanilla": ["strategy=graph_parallel", "strategy.overlap=none"],
    "graph_parallel": ["strategy=graph_parallel"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
    "minibatch": ["strategy=minibatch"],
    "minibatch subgraph": ["strategy=minibatch", "strategy.normalize=subgraph"],
    "control": ["strategy=graph_parallel", "codec=drop"],
}
METHODS = {
    "sar": ["strategy=sar"],
    "sar pull": ["strategy=sar", "strategy.backward=pull"],
    "adaqp_q": ["strategy=adaqp_q"],
    "adaqp_p": ["strategy=adaqp_p"],
    "adaqp": ["strategy=adaqp"],
    "gnnpipe": ["strategy=gnnpipe"],
    "hybrid 1x2": ["strategy=hybrid", "strategy.stages=1", "strategy.parts=2"],
    "tag": ["strategy=tag"],
}
# of other papers: trained in `rivals`, timed in experiments/rivals and in the rehearsal
OTHERS = {
    "pipegcn": ["strategy=pipegcn"],
    "bns": ["strategy=bns"],
    "feature": ["strategy=feature"],
    "digest": ["strategy=digest"],
    "cagnet": ["strategy=cagnet"],
    "sancus": ["strategy=sancus"],
    "cofree": ["strategy=cofree"],
    "minibatch cluster": ["strategy=minibatch", "strategy.sampler=cluster", "strategy.normalize=subgraph"],
    "minibatch saint": ["strategy=minibatch", "strategy.sampler=saint"],
}
CACHED = {
    f"{name} cached": [*BASELINES[name], "first_layer=cached"] for name in ("single", "graph_parallel bf16", "control")
}
HYBRID = {"hybrid 2x2": ["strategy=hybrid", "strategy.stages=2", "strategy.parts=2", "world_size=4"]}
NOMINAL = {"tag": ["strategy=tag", "strategy.rates=nominal"]}  # threads have no links to measure
# how mini-batches scale their sums changes their accuracy, not their time
TIMED = {k: v for k, v in (BASELINES | METHODS | CACHED).items() if k != "minibatch subgraph"}
TRAINED = {k: v for k, v in (BASELINES | METHODS | HYBRID | NOMINAL).items() if k != "hybrid 1x2"}
# those whose numbers differ: overlaps move messages, not sums
DISTINCT = (
    {
        name: TRAINED[name]
        for name in (
            "single",
            "graph_parallel",
            "graph_parallel bf16",
            "minibatch",
            "control",
            "sar",
            "adaqp",
            "gnnpipe",
        )
    }
    | HYBRID
    | NOMINAL
)
# beside what every study has, the methods of other papers: as they come, or with the paper's knob
RIVALS = {name: BASELINES[name] for name in ("single", "graph_parallel", "graph_parallel bf16", "control")} | {
    "pipegcn": OTHERS["pipegcn"],
    "pipegcn both": ["strategy=pipegcn", "strategy.smooth_features=true", "strategy.smooth_gradients=true"],
    "bns": OTHERS["bns"],
    "bns 0.5": ["strategy=bns", "strategy.rate=0.5"],
    "feature": OTHERS["feature"],
    "cagnet": OTHERS["cagnet"],
    "sancus k=4": ["strategy=sancus", "strategy.period=4"],
    "digest k=10": ["strategy=digest", "strategy.period=10"],
    "cofree": OTHERS["cofree"],
    "minibatch": BASELINES["minibatch"],
    "minibatch cluster": OTHERS["minibatch cluster"],
    "minibatch saint": OTHERS["minibatch saint"],
}
# what a verdict on accuracy is asked of: exact, rounded, quantized and stale messages, and none
JUDGED = {name: DISTINCT[name] for name in ("single", "graph_parallel", "graph_parallel bf16", "control", "adaqp")} | {
    "gnnpipe": METHODS["gnnpipe"]
}
AS_MANY_STEPS = {"minibatch": ["strategy=minibatch", "epochs=20", "fidelity_every=7"]}  # of 20 steps each
REMEDY = ["strategy.gradient=mix", "strategy.history_init=exact", "strategy.refresh_exact=true"]
DEEP = DISTINCT | {
    "gnnpipe mix": ["strategy=gnnpipe", *REMEDY],
    "control, 4 ranks": [*BASELINES["control"], "world_size=4"],
}

SHAPE = ["model.num_layers=3", "model.hidden=128"]
DATASET = ["dataset=sbm", "dataset.num_features=128"]
NODES = "dataset.num_nodes=20000"
LARGE = [*DATASET, NODES, *SHAPE, "world_size=2", "seed=0", "epochs=26", "eval_every=26"]
TO_TARGET = [*DATASET, NODES, *SHAPE, "world_size=2", "seed=${block}", "epochs=60", "eval_every=5"]
THREADS = ["world_size=2", "comm=threads", "threads_per_rank=1"]
CURVE = ["epochs=60", "eval_every=5", "fidelity_every=20"]
SHALLOW = ["dataset=sbm", "model.num_layers=3", "model.hidden=64", *THREADS]
SMALL = [*SHALLOW, *CURVE]
# until validation rises no more; probes in every phase of periods of 4 and 10 epochs
SMALL_LONG = [*SHALLOW, "epochs=400", "eval_every=5", "fidelity_every=33"]
VERDICT = ["dataset=sbm_verdict", *SMALL_LONG[1:]]
SMALL_DEEP = [
    "dataset=sbm",
    "model=resgcn",
    "model.num_layers=16",
    "model.dropout=0.2",
    "optim.lr=0.003",
    *THREADS,
    "epochs=150",
    "eval_every=5",
    "fidelity_every=50",
]
PACED = ["launch=paced", "launch.hosts=2", "launch.rate_gbps=1"]
CLASSIC = ["model.hidden=64", "optim.weight_decay=5e-4", *THREADS, "fidelity_every=20", "eval_every=5"]
# dataset -> folder of its raw files, epochs, minutes, overrides; where there are several splits, a seed has its own
REAL = {
    "cora": ("Cora", 200, 30, []),
    "citeseer": ("CiteSeer", 200, 15, []),
    "computers": ("Computers", 100, 10, ["dataset.split_seed=null"]),
    "cs": ("CS", 40, 20, ["dataset.split_seed=null"]),
    "squirrel": ("Squirrel", 100, 15, ["dataset.split_index=null"]),
    "tolokers": ("tolokers", 100, 10, ["dataset.split_index=null"]),
}
SEEDS = 10  # for a margin of 0.3 points (protocol, rule 12)
BLOCKS = 5
TUNED = ", tuned"  # ends the name of a job with what its trials chose
Jobs = Mapping[str, Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Study:
    """`blocks` launches of every job, interleaved; or, where times do not matter (0), a sweep over `seeds` a job."""

    name: str  # of its file
    about: str
    jobs: Jobs
    common: Sequence[str]
    minutes: int  # on two cores, by what its lines took
    blocks: int = 0
    seeds: int = 0
    baseline: str = "single"
    paced: bool = False
    files: str = ""
    trials: int = 0  # of every strategy before it trains with what was best

    @property
    def listed(self) -> list[str]:
        """The jobs whose lines its file has, in the order of tables: a tuned one follows the same as it comes."""
        tuned = [TUNED] if self.trials else []
        return [f"{name}{end}" for name in self.jobs for end in ("", *tuned)]

    @property
    def runs(self) -> int:
        """Lines of its file when it is done; a tuned job also has its row as it comes."""
        times = (self.blocks or self.seeds) * (2 if self.trials else 1)
        return times * sum(1 + _models(job).count(",") for job in self.jobs.values())


def _models(job: Sequence[str]) -> str:
    return next((override for override in job if override.startswith("model=")), "")


def timed(models: Sequence[str], methods: Jobs, *, paced: bool = False) -> Jobs:
    """One thread a rank. One rank has no link, and as a baseline it also has all threads of the machine."""
    jobs = {}
    for model in models:
        for name, overrides in methods.items():
            links = PACED if paced and not name.startswith("single") else []
            jobs[f"{model} {name}"] = [f"model={model}", *overrides, *links, "threads_per_rank=1"]
        jobs[f"{model} single, all threads"] = [f"model={model}", "strategy=single"]
    return jobs


def trained(models: Sequence[str], methods: Jobs) -> Jobs:
    """A job a model and method."""
    return {
        f"{model} {name}": [f"model={model}", *overrides] for model in models for name, overrides in methods.items()
    }


def real(dataset: str, *, models: Sequence[str], methods: Jobs, seeds: int, epochs: int = 0) -> Study:
    files, usual, minutes, overrides = REAL[dataset]
    return Study(
        name=dataset,
        about=f"{dataset}: accuracy, fidelity and bytes over {seeds} seeds",
        jobs=trained(models, methods),
        common=[f"dataset={dataset}", *overrides, *CLASSIC, f"epochs={epochs or usual}"],
        seeds=seeds,
        files=files,
        minutes=minutes,
    )


THREE = ("gcn", "sage", "gat")
STUDIES = [
    Study(
        name="speed",
        about="sbm, 20,000 nodes: epochs over loopback",
        jobs=timed(THREE, TIMED),
        common=LARGE,
        blocks=BLOCKS,
        minutes=60,
    ),
    Study(
        name="paced",
        about="the same over links of 1 Gbit/s",
        paced=True,
        baseline="graph_parallel",
        jobs=timed(THREE, TIMED, paced=True),
        common=LARGE,
        blocks=BLOCKS,
        minutes=65,
    ),
    Study(
        name="accuracy",
        about="sbm, 3,000 nodes: accuracy, fidelity and bytes over 10 seeds",
        jobs={name: [*overrides, f"model={','.join(THREE)}"] for name, overrides in TRAINED.items()},
        common=SMALL,
        seeds=SEEDS,
        minutes=20,
    ),
    Study(
        name="rivals",
        about="sbm, 3,000 nodes, 400 epochs: accuracy, fidelity and bytes of the rivals over 10 seeds",
        jobs=trained(["sage", "gcn"], RIVALS),
        common=SMALL_LONG,
        seeds=SEEDS,
        minutes=40,
    ),
    Study(
        name="verdict",
        about="sbm_verdict, 17,000 nodes, 400 epochs: accuracy over 10 seeds, each with its own graph",
        jobs=trained(["sage", "gcn"], JUDGED) | trained(["sage", "gcn"], AS_MANY_STEPS),
        common=VERDICT,
        seeds=SEEDS,
        minutes=80,
    ),
    Study(
        name="target",
        about="sbm, 20,000 nodes: time and gigabytes to accuracy, a seed a block",
        jobs=timed(["gcn"], BASELINES | METHODS),
        common=TO_TARGET,
        blocks=BLOCKS,
        minutes=40,
    ),
    Study(
        name="target_paced",
        about="the same over links of 1 Gbit/s",
        paced=True,
        baseline="graph_parallel",
        jobs=timed(["gcn"], BASELINES | METHODS, paced=True),
        common=TO_TARGET,
        blocks=BLOCKS,
        minutes=45,
    ),
    Study(
        name="deep",
        about="sbm, 3,000 nodes, ResGCN+ of 16 layers: accuracy over 10 seeds",
        jobs=DEEP,
        common=SMALL_DEEP,
        seeds=SEEDS,
        minutes=45,
    ),
    Study(
        name="sbm_products",
        about="sbm_products, 12,245 nodes: accuracy over 10 seeds",
        jobs=trained(["gcn"], DISTINCT),
        common=["dataset=sbm_products", "model.num_layers=3", *THREADS, *CURVE],
        seeds=SEEDS,
        minutes=15,
    ),
    Study(
        name="sbm_reddit",
        about="sbm_reddit, 9,319 nodes of 492 edges: accuracy over 10 seeds",
        jobs=trained(["gcn"], DISTINCT),
        common=["dataset=sbm_reddit", *THREADS, "epochs=30", "eval_every=5", "fidelity_every=10"],
        seeds=SEEDS,
        minutes=15,
    ),
    # every model on one graph; what another graph changes is seen on one model
    real("cora", models=THREE, methods=DISTINCT, seeds=SEEDS),
    *(real(name, models=["gcn"], methods=DISTINCT, seeds=SEEDS) for name in REAL if name != "cora"),
    Study(
        name="tuned",
        about="sbm, 3,000 nodes: 16 trials a strategy on other seeds, then 10 seeds of the best",
        jobs=trained(("gcn", "gat"), {k: v for k, v in DISTINCT.items() if k != "tag"}),
        common=SMALL,
        seeds=SEEDS,
        trials=16,
        minutes=60,
    ),
]

# the same in small, in ten minutes: a rehearsal, whose figures say nothing
FEW = {name: TIMED[name] for name in ("single", "vanilla", "graph_parallel bf16", "control", "adaqp", "gnnpipe", "tag")}
BRIEFLY = ("single", "graph_parallel", "control", "adaqp", "minibatch")
BRIEF = ["epochs=24", "eval_every=6"]  # more than a period of adaptive bits
QUICK = [
    Study(
        name="quick_speed",
        about="sbm, 3,000 nodes: every strategy over loopback",
        jobs=timed(["gcn"], TIMED | OTHERS),
        blocks=1,
        minutes=5,
        common=["dataset=sbm", "model.num_layers=3", "world_size=2", "seed=0", *BRIEF],
    ),
    Study(
        name="quick_paced",
        about="some over links of 1 Gbit/s",
        paced=True,
        baseline="graph_parallel",
        jobs=timed(["gcn"], FEW, paced=True),
        blocks=1,
        minutes=1,
        common=["dataset=sbm", "model.num_layers=3", "world_size=2", "seed=0", *BRIEF],
    ),
    Study(
        name="quick_accuracy",
        about="sbm, 1,000 nodes: accuracy, fidelity and bytes over 2 seeds",
        jobs={name: [*overrides, f"model={','.join(THREE)}"] for name, overrides in DISTINCT.items()},
        common=[*SMALL, "dataset.num_nodes=1000", "epochs=20", "fidelity_every=10"],
        seeds=2,
        minutes=2,
    ),
    Study(
        name="quick_deep",
        about="sbm, 1,000 nodes, ResGCN+ of 16 layers: accuracy over 2 seeds",
        jobs={name: DEEP[name] for name in ("single", "graph_parallel", "control", "gnnpipe", "hybrid 2x2")},
        common=[*SMALL_DEEP, "dataset.num_nodes=1000", "epochs=12", "fidelity_every=5"],
        seeds=2,
        minutes=1,
    ),
    replace(
        real("cora", models=["gcn"], seeds=2, epochs=30, methods={k: DISTINCT[k] for k in BRIEFLY}),
        name="quick_cora",
        minutes=1,
    ),
]
