"""Checks of gnnpar on a device, for first_hour.py: `python kernels/bench/proofs.py NAME ...`; exit code 0: it holds.

versions DEVICE                 a sum on the device, and installed versions
golden DEVICE STRATEGY ...      losses in fp64, rank threads on the device, against tests/golden (made on a CPU)
pair DEVICE STRATEGY MODEL      two ranks over gloo on the device and on the CPU: losses to 1e-4, bytes equal
waits DEVICE STRATEGY           waits of the host in an epoch: torch's own warnings, or on a CPU the simulated GPU
captured DEVICE STRATEGY MODEL  epochs replayed from a CUDA graph and others: losses equal to the bit; and their times
nccl DEVICE                     two ranks that share one GPU exchange rows over NCCL (cpu: the same over gloo)
table FOLDER                    copies the recorded tiles there
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path
from statistics import median

ROOT = Path(__file__).resolve().parents[2]
QUANTIZED = 1e-4  # relative, of a loss: one different rounding changes the rest of a run
FP32 = 1e-4


def versions(device: str) -> str:
    import torch
    import triton

    if device == "cuda":
        found = torch.cuda.get_device_properties(0)
        where = f"{found.name}, {found.total_memory / 2**30:.0f} GiB, CUDA {torch.version.cuda}"
    else:
        where = "CPU"
    assert float(torch.ones(1000, device=device).sum()) == 1000
    return f"{where}, torch {torch.__version__}, Triton {triton.__version__}, Python {sys.version.split()[0]}"


def golden(device: str, *strategies: str) -> str:
    import torch

    from golden_runs import is_quantized, losses, recorded, runs

    on, worst, wrong = torch.device(device), 0.0, []
    for strategy in strategies:
        limit = QUANTIZED if is_quantized(strategy) else 1e-9
        of_it = [c for s, c in runs() if s == strategy and (c.isdigit() or c in ("gcn", "gat", "gatv2", "sage_max"))]
        cases = {case: (recorded()[strategy][case], losses(strategy, case, on)) for case in of_it}
        for case, (expected, found) in cases.items():
            error = max(abs(a - b) / abs(b) for a, b in zip(found, expected, strict=True))
            print(f"{strategy} {case}: {error:.1e}", flush=True)
            worst = max(worst, error)
            wrong += [f"{strategy} {case} {error:.1e}"] if error > limit else []
    assert not wrong, f"losses differ from tests/golden: {', '.join(wrong)}"
    return f"losses of {len(strategies)} strategies as recorded, worst {worst:.1e}"


def pair(device: str, strategy: str, model: str) -> str:
    job = [f"strategy={strategy}", f"model={model}", "dataset=sbm", "world_size=2", "epochs=4", "comm=gloo"]
    with tempfile.TemporaryDirectory() as folder:
        results = []
        for each in (device, "cpu"):
            _gnnpar("train", *job, f"device={each}", f"hydra.run.dir={folder}/{len(results)}")
            results.append(json.loads(Path(folder, str(len(results)), "result.json").read_text()))
    mine, cpu = results
    errors = [abs(mine["loss"][k] - cpu["loss"][k]) / abs(cpu["loss"][k]) for k in ("first", "last")]
    assert max(errors) <= FP32, f"losses {mine['loss']} on {device}, {cpu['loss']} on the CPU"
    assert mine["bytes_per_epoch"] == cpu["bytes_per_epoch"], "bytes differ"
    return f"losses differ by {max(errors):.1e}, {cpu['bytes_per_epoch']['total']} bytes an epoch in both"


def waits(device: str, strategy: str) -> str:
    import torch

    from synchronisation_runs import job_of, losses_and_events, train

    job, world = job_of(strategy, "gcn")
    if device == "cpu":
        events = losses_and_events(job, world)[1]
        return f"{len(events)} waits in an epoch of {world} ranks, at {len({str(e) for e in events})} places"
    from gnnpar.comm import ThreadWorld

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")

        def on_gpu(comm: object) -> None:
            train(job, comm, before_last=lambda: torch.cuda.set_sync_debug_mode("warn"))

        ThreadWorld(world, device=torch.device("cuda")).run(on_gpu)
        torch.cuda.set_sync_debug_mode("default")
    places = {f"{Path(w.filename).name}:{w.lineno}" for w in caught if "synchroniz" in str(w.message)}
    for place in sorted(places):
        print(place)
    return f"{len(places)} places wait in an epoch of {world} ranks"


def captured(device: str, strategy: str, model: str) -> str:
    """Run over NCCL, with two ranks on one GPU. On a CPU, simulate GPU and graph."""
    if device == "cpu":
        from captured_runs import EPOCHS, WARM_UP, run, simulated

        with simulated() as cuda:
            plain, replayed = (run(cuda, strategy, model, replays=replays)[0] for replays in (False, True))
        assert replayed.losses == plain.losses, f"losses {replayed.losses}, not captured {plain.losses}"
        assert replayed.traffic == plain.traffic, "bytes differ"
        return f"{EPOCHS - WARM_UP} replays with the losses of epochs, simulated"
    epochs = 30 if strategy == "single" else 12  # two processes take turns on the GPU
    job = [f"strategy={strategy}", f"model={model}", "dataset=sbm", "world_size=2", "comm=nccl", f"epochs={epochs}"]
    job += ["device=cuda", "tracker=jsonl", "optim.schedule=cosine"]
    with tempfile.TemporaryDirectory() as folder:
        runs: list[list[dict]] = []
        for number, graph in enumerate(("false", "true")):
            where = Path(folder, str(number))
            _gnnpar("train", *job, f"launch.cuda_graph={graph}", f"hydra.run.dir={where}")
            runs.append([json.loads(line) for line in (where / "metrics.jsonl").read_text().splitlines()])
    plain, replayed = ([row["loss/train"] for row in rows if "loss/train" in row] for rows in runs)
    assert replayed == plain, f"losses {replayed}, not captured {plain}"
    times = [median(row["time/epoch_seconds"] for row in rows[8:] if row.get("time/timed")) * 1e3 for rows in runs]
    return f"{len(plain)} losses equal; an epoch {times[0]:.2f} ms, replayed {times[1]:.2f} ms"


def nccl(device: str) -> str:
    """NVIDIA supports one rank per GPU, so each rank claims to be a separate host. For correctness only."""
    backend, where = ("nccl", "cuda:0") if device == "cuda" else ("gloo", "cpu")
    program = (
        "import os, sys, torch, comm_bodies\n"
        "from gnnpar.comm.process import connect\n"
        "backend, device, there = sys.argv[1], torch.device(sys.argv[2]), sys.argv[3]\n"
        "key = os.environ['KEY'].encode()\n"
        "comm = connect(backend, device=device, key=key, timeout_seconds=40, init_method=there)\n"
        "assert comm_bodies.rows_arrive(comm); comm.close()"
    )
    key = {"KEY": secrets.token_hex(32), "GLOO_SOCKET_IFNAME": "lo"}
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-P", "-c", program, backend, where, f"file://{folder}/meeting"],
                env=os.environ | key | {"GNNPAR_SHARE_GPU": "1", "WORLD_SIZE": "2", "RANK": str(rank)},
            )
            for rank in range(2)
        ]
        codes = [process.wait(timeout=55) for process in ranks]
    assert codes == [0, 0], f"exit codes {codes}"
    return f"two ranks on one {device} exchanged rows over {backend}"


def table(folder: str) -> str:
    found = sorted((ROOT / "kernels" / "gnnpar_kernels" / "tuned").glob("*.json"))
    for path in found:
        shutil.copy(path, folder)
    return f"{len(found)} tables of tiles copied"


def _gnnpar(*arguments: str) -> None:
    done = subprocess.run(
        [sys.executable, "-P", "-m", "gnnpar", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"gnnpar {arguments[0]}: {(done.stderr or done.stdout).strip()[-300:]}"


PROOFS = {each.__name__: each for each in (versions, golden, pair, waits, captured, nccl, table)}

if __name__ == "__main__":
    try:
        print(PROOFS[sys.argv[1]](*sys.argv[2:]))
    except AssertionError as error:
        sys.exit(str(error))
