"""launch.dilation: ranks that get a part of a core, over links of a part of their rate, with clocks as slow as they."""

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from multiprocessing import get_context
from pathlib import Path

import pytest

from conftest import ROOT, Run
from gnnpar.comm import clock
from gnnpar.comm.world import Links
from gnnpar.config.compose import compose
from gnnpar.files import process_start
from gnnpar.launch.emulated import cpu_shares, paced
from gnnpar.launch.emulated.namespaces import Network
from gnnpar.launch.launch import world_of
from gnnpar.planner.machines import setting_of
from gnnpar.planner.planned import planned
from gnnpar.pricing.rates import NOMINAL, Rates
from gnnpar.track.jsonl import read_rows

can_share = pytest.mark.skipif(cpu_shares.missing() is not None, reason=f"launch.dilation {cpu_shares.missing()}")


@pytest.fixture
def capable(monkeypatch: pytest.MonkeyPatch) -> Callable[[str | None], None]:
    """As if this machine could; capable(line): as if it had no cpu controller."""
    monkeypatch.setattr(paced, "missing", lambda: None)

    def set_missing(line: str | None) -> None:
        monkeypatch.setattr(cpu_shares, "missing", lambda: line)

    set_missing(None)
    return set_missing


def test_dilated_clocks_divide_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clock, "_seconds_here", 1.0)
    monkeypatch.setattr(time, "perf_counter", lambda: 10.0)
    monkeypatch.setattr(time, "monotonic", lambda: 6.0)
    assert (clock.perf_counter(), clock.monotonic()) == (10.0, 6.0)
    clock.dilate(4.0)
    assert (clock.perf_counter(), clock.monotonic()) == (2.5, 1.5)


def test_code_of_ranks_reads_the_dilated_clocks() -> None:
    """Deadlines of this machine alone, in which nothing is measured, are read from its own."""
    source = ROOT / "src" / "gnnpar"
    of_ranks = ("codecs", "comm", "folds", "models", "parallel", "partition/shard.py", "training")
    own = {"comm/clock.py", "training/checkpoint/policy.py"}
    files = {file for name in of_ranks for file in [source / name, *(source / name).rglob("*.py")] if file.is_file()}
    reads = re.compile(r"\btime\.(perf_counter|monotonic)\b")
    assert {str(f.relative_to(source)) for f in files if reads.search(f.read_text(encoding="utf-8"))} == own


def test_links_of_a_dilated_run_are_as_slow_as_ranks() -> None:
    network = Network(host_gbps=(1.0, 1.0), burst_kib=256, dilation=4.0)
    assert network.bucket(1.0) == "tbf rate 250000000bit burst 256kb latency 80ms"
    assert network.limit(1.0).startswith("htb rate 250000000bit ceil 250000000bit burst 256kb")
    assert network.describe() == "2 hosts x 1 Gbit/s, dilated 4 times"
    assert network.facts()["rates"]["dilation"] == 4.0
    assert "dilation" not in Links(host_gbps=(1.0, 1.0)).facts()["rates"]


COMMON = ["launch=paced", "topology.cores=2", "launch.dilation=auto"]
NEEDS = "needs the kernel's cpu controller"


def test_ranks_fit_the_cores(capable: Callable[[str | None], None]) -> None:
    common = [*COMMON, "world_size=8"]
    world = world_of(compose(common))
    assert (world.dilation, world.threads_per_rank, world.oversubscribed) == (4.0, 1, False)
    assert world_of(compose([*common, "threads_per_rank=2"])).dilation == 8.0
    assert world_of(compose([*common[:2], "world_size=8", "launch.dilation=5"])).dilation == 5.0
    assert world_of(compose(COMMON)).dilation == 1.0
    assert world_of(compose([*COMMON[:2], "world_size=8", "threads_per_rank=1"])).oversubscribed
    line = r"^launch\.dilation=2: 8 threads of ranks need 4 cores, and there are 2; set it to 4 or more$"
    with pytest.raises(ValueError, match=line):
        world_of(compose([*COMMON[:2], "world_size=8", "launch.dilation=2"]))
    capable(NEEDS)
    with pytest.raises(ValueError, match=rf"^launch\.dilation=4 {NEEDS}, or set launch\.dil"):
        world_of(compose([*COMMON[:2], "world_size=8", "launch.dilation=4"]))


def test_ranks_of_other_speeds_get_shares_of_cores(capable: Callable[[str | None], None]) -> None:
    common = [*COMMON, "world_size=3"]
    links = world_of(compose([*common, "launch.speeds=[1,0.5,0.25]"])).links
    assert links is not None and links.cores(1) == pytest.approx((1 / 1.5, 0.5 / 1.5, 0.25 / 1.5))
    assert links.describe() == "3 hosts x 1 Gbit/s, ranks of 1, 0.5, 0.25 times the speed, dilated 1.5 times"
    assert links.facts()["rates"]["speeds"] == [1.0, 0.5, 0.25]
    assert Links(host_gbps=(1.0, 1.0), host_of=(0, 1)).cores(1) == ()
    assert Links(host_gbps=(1.0, 1.0), host_of=(0, 1), dilation=2.0).cores(3) == (1.5, 1.5)
    with pytest.raises(ValueError, match=r"^launch\.speeds=\[1,0\.5\] is of 2, and there are 3 ranks$"):
        world_of(compose([*common, "launch.speeds=[1,0.5]"]))
    with pytest.raises(ValueError, match=r"speeds"):
        compose([*common, "launch.speeds=[1,0.5,2]"])
    capable(NEEDS)
    with pytest.raises(ValueError, match=rf"^launch\.speeds=\[1,0\.5\] {NEEDS}, or set launch"):
        world_of(compose([*COMMON[:2], "world_size=2", "launch.speeds=[1,0.5]"]))


def test_planner_sees_dilation_and_speeds(tmp_path: Path, capable: object) -> None:
    common = ["launch=paced", "topology.cores=2", "world_size=4", f"cache_dir={tmp_path}"]

    def rates(*more: str) -> list[Rates]:
        return list(setting_of(compose([*common, *more]), None, measuring=False)[0].rates)

    here = rates("launch.dilation=auto")
    assert here == [NOMINAL] * 4, "four cores, each of one rank"
    assert rates()[0].scale == 2 * NOMINAL.scale, "two cores, each of two ranks"
    mixed = rates("launch.dilation=auto", "launch.speeds=[1,1,0.5,0.25]")
    assert mixed[:2] == here[:2]
    assert [r.scale for r in mixed[2:]] == [2 * NOMINAL.scale, 4 * NOMINAL.scale]
    assert mixed[3].message == 4 * NOMINAL.message


def test_controller_is_found_in_mounts() -> None:
    second = "cgroup2 /sys/fs/cgroup cgroup2 rw 0 0\n"
    first = "cgroup /sys/fs/cgroup/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
    account = "cgroup /sys/fs/cgroup/cpuacct cgroup rw,cpuacct 0 0\n"
    assert cpu_shares.controller(account) is None
    assert cpu_shares.controller(account + second) == cpu_shares.Controller(Path("/sys/fs/cgroup"), 2)
    both = cpu_shares.controller(second + first + account)
    assert both == cpu_shares.Controller(Path("/sys/fs/cgroup/cpu,cpuacct"), 1), "v1 has it, v2 is there without it"


@pytest.mark.parametrize(
    ("version", "files"),
    [(1, {"cpu.cfs_period_us": "4000", "cpu.cfs_quota_us": "1000"}), (2, {"cpu.max": "1000 4000"})],
)
def test_limit_of_a_cgroup_writes_the_files_of_its_version(version: int, files: dict[str, str], tmp_path: Path) -> None:
    cpu_shares.Controller(tmp_path, version).limit(tmp_path, 1000, 4000)
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == files


def burn(group: str, seconds: float) -> None:
    cpu_shares.enter(group)
    began, used = time.monotonic(), time.process_time()
    while time.monotonic() - began < seconds:
        pass
    assert time.process_time() - used < 0.4 * seconds


@can_share
def test_rank_gets_no_more_than_its_share() -> None:
    with cpu_shares.shared((0.9, 0.2)) as groups:
        assert [Path(group).exists() for group in groups] == [True, True]
        rank = get_context("fork").Process(target=burn, args=(groups[1], 0.5))
        rank.start()
        rank.join()
        assert rank.exitcode == 0
    assert [Path(group).exists() for group in groups] == [False, False]


def test_only_groups_of_dead_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_shares, "own_controller", lambda: cpu_shares.Controller(tmp_path, 1))
    monkeypatch.setattr(cpu_shares, "_GONE_SECONDS", 0.0)
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        dead = f"gnnpar-{process.pid}-{process_start(process.pid)}-rank0"
        process.communicate(b"\n")
    mine = f"gnnpar-{os.getpid()}-{process_start(os.getpid())}-rank7"
    reused = f"gnnpar-{os.getpid()}-1-rank0"  # this process's number, but it started later
    for name in (dead, mine, reused, "gnnpar", "docker-1-1-0"):
        (tmp_path / name).mkdir()
    with cpu_shares.shared((1.0,)):
        left = {each.name for each in tmp_path.iterdir()}
    assert left - {mine.replace("rank7", "rank0")} == {mine, "gnnpar", "docker-1-1-0"}


@can_share
def test_dilated_run_gives_times_of_the_emulated_machine(run_here: Run, tmp_path: Path, shaped_links: None) -> None:
    began = time.monotonic()
    options = ("world_size=4", "topology.cores=2", "launch.rate_gbps=1", "launch.dilation=auto", "epochs=7")
    done = run_here("train", "model=gcn", "dataset=sbm", "launch=paced", *options, "hydra.run.dir=run")
    elapsed = time.monotonic() - began
    assert (done.returncode, done.stderr) == (0, "")
    assert "4 hosts x 1 Gbit/s, dilated 2 times" in done.stdout
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["provenance"], result["oversubscribed"], result["threads_per_rank"]) == ("paced", False, 1)
    assert result["paced"]["rates"]["dilation"] == 2.0
    seconds = [row["time/epoch_seconds"] for row in read_rows(tmp_path / "run") if "time/epoch_seconds" in row]
    assert 2.0 * sum(seconds) < elapsed
    breakdown = {k: v for k, v in result["breakdown_seconds"].items() if k != "comm_total"}
    assert sum(breakdown.values()) == pytest.approx(result["epoch_seconds"]["mean"], rel=0.02), "one clock for all"


def test_plan_gives_slower_ranks_less(tmp_path: Path, capable: object) -> None:
    """Over links that make little of an epoch, so that computing decides."""
    common = ["model=gcn", "dataset=sbm", "dataset.num_nodes=2000", "world_size=2", f"cache_dir={tmp_path}"]
    paced_links = ["launch=paced", "launch.rate_gbps=100", "topology.cores=2", "threads_per_rank=1"]

    def nodes(*more: str) -> list[int]:
        settings = compose([*common, *paced_links, *more])
        found = planned(settings, ranks=None, allowed=frozenset({"exact"}), measuring=False)
        shares = next((p.shares for p in found.evaluated if p.shares), ())
        return [round(100 * share) for share in shares]

    assert nodes() == []
    fast, slow = nodes("launch.speeds=[1,0.25]")
    assert fast > 60 and slow < 40
