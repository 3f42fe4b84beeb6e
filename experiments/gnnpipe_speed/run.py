"""Epoch time of deep GNNs: graph_parallel, gnnpipe and hybrid, over a shaped link and over loopback.

The link's rate is found first, on graph_parallel without overlap alone, so that it spends 65 % of its epoch in
communication (GNNPipe's own share); then all strategies take turns on that link, in blocks of random order.

    python experiments/gnnpipe_speed/run.py            # appends to results.jsonl, about 90 minutes on 2 quiet cores
    python experiments/gnnpipe_speed/run.py --smoke    # two minutes: does it run? writes smoke.jsonl
    python experiments/gnnpipe_speed/report.py         # tables and figure.svg from results.jsonl

Needs root and iproute2. A study that was stopped goes on where it was, with the rates of rates.json.
"""

import argparse
import json
import sys
from pathlib import Path

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

import blocks

TARGET, TOLERANCE = 0.65, 0.05
MODELS = ("gcn", "sage", "gcnii", "resgcn")
BASE = "vanilla"
STRATEGIES = {
    BASE: ["strategy=graph_parallel", "strategy.overlap=none"],  # the paper's baseline
    "graph_parallel": ["strategy=graph_parallel"],
    "graph_parallel bf16": ["strategy=graph_parallel", "codec=bf16"],
    "gnnpipe": ["strategy=gnnpipe"],
    "gnnpipe v=2": ["strategy=gnnpipe", "strategy.virtual=2"],
}
FOUR = {  # bytes and bubble at 4 ranks; on 2 cores its times say nothing
    BASE: STRATEGIES[BASE],
    "gnnpipe": STRATEGIES["gnnpipe"],
    "gnnpipe v=2": STRATEGIES["gnnpipe v=2"],
    "hybrid": ["strategy=hybrid", "strategy.stages=2", "strategy.parts=2"],
}


def common(layers: int, scale: float, degree: float, epochs: int) -> list[str]:
    """H = 100 and linear layers in and out, as in the paper; the graph is Reddit's in small, with Reddit's alpha."""
    return [
        "dataset=sbm_reddit",
        f"dataset.scale={scale}",
        f"dataset.avg_degree={degree}",
        "model.hidden=100",
        f"model.num_layers={layers}",
        "model.encoder=linear",
        "model.decoder=linear",
        "threads_per_rank=1",
        "seed=0",
        f"epochs={epochs}",
        f"eval_every={epochs}",
    ]


def paced(rate: float) -> list[str]:
    return ["world_size=2", "launch=paced", "launch.hosts=2", f"launch.rate_gbps={rate:.4f}"]


def find_rate(asked: list[str], *, tolerance: float) -> dict[str, float]:
    """The rate at which the base waits for messages in 65 % of its epoch; the strategies under test take no part.

    With compute c, halo bytes h and gradient bytes g an epoch is c + (h + g) / r and the share its h / r: each
    measurement gives c, h, g, and so the next r.
    """
    rate = 1.0
    for _ in range(7):
        result = blocks.train([*asked, *STRATEGIES[BASE], *paced(rate)])["result"]
        spent = result["breakdown_seconds"]
        halo = spent["exposed_wire"] + spent["exposed_skew"]
        epoch = sum(spent[name] for name in spent if name != "comm_total")
        share = halo / epoch
        print(f"rate {rate:.4f} Gbit/s: the base spends {share:.1%} in communication", flush=True)
        if abs(share - TARGET) <= tolerance:
            return {"rate": rate, "share": share}
        room = halo * (1 - TARGET) - spent["reduce"] * TARGET
        if room <= 0:
            raise SystemExit(f"no rate gives {TARGET:.0%}: gradients are too large a part of the bytes; raise --scale")
        rate = min(20.0, max(rate * room / ((epoch - halo - spent["reduce"]) * TARGET), 1e-3))
    raise SystemExit("no rate found in 7 attempts: the machine is too busy for this measurement")


def rates(file: Path, models: list[str], asked: list[str], *, tolerance: float) -> dict[str, dict[str, float]]:
    """By model; those found already are kept."""
    found = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    for model in models:
        if model not in found:
            print(model, flush=True)
            found[model] = find_rate([*asked, f"model={model}"], tolerance=tolerance)
            file.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return {model: found[model] for model in models}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="a tiny graph, one model, a few epochs")
    parser.add_argument("--scale", type=float, default=0.025, help="of sbm_reddit's nodes")
    parser.add_argument("--degree", type=float, default=80.0, help="average; a graph so small cannot have Reddit's 492")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--epochs", type=int, default=15, help="5 of them are warm-up")
    parser.add_argument("--blocks", type=int, default=5)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=MODELS)
    options = parser.parse_args()
    out = HERE / ("smoke.jsonl" if options.smoke else "results.jsonl")
    if options.smoke:
        options.scale, options.degree, options.layers, options.epochs = 0.003, 12.0, 8, 6
        options.blocks, options.models = 1, ["gcn"]
    asked = common(options.layers, options.scale, options.degree, options.epochs)
    found = rates(
        out.with_name(out.stem.replace("results", "rates") + ".json"),
        options.models,
        asked,
        tolerance=1.0 if options.smoke else TOLERANCE,
    )
    two, four = {}, {}
    for model, at in found.items():
        shape = [f"model={model}"]
        for name, strategy in STRATEGIES.items():
            two[f"paced; {model}; {name}"] = [*shape, *strategy, *paced(at["rate"])]
            two[f"loopback; {model}; {name}"] = [*shape, *strategy, "world_size=2"]
        for name, strategy in FOUR.items():
            four[f"4 ranks; {model}; {name}"] = [*shape, *strategy, "world_size=4"]
    blocks.run(two, blocks=range(options.blocks), common=asked, out=out)
    blocks.run(four, blocks=range(1), common=asked, out=out)


if __name__ == "__main__":
    main()
