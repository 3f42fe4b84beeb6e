"""launch=paced: places of ranks, refusals, links that carry their rate; launch.dilation: ranks get a part of a core."""

import json
import logging
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch

import outcomes
from conftest import ROOT, Refused, Run
from gnnpar.comm import Communicator, MessageTag, clock
from gnnpar.comm.world import Links, RunHooks
from gnnpar.config.compose import compose
from gnnpar.files import process_start
from gnnpar.launch import processes
from gnnpar.launch.emulated import cpu_shares, namespaces, paced
from gnnpar.launch.emulated.namespaces import Network, interface_sent_bytes, missing
from gnnpar.launch.launch import world_of
from gnnpar.planner.machines import setting_of
from gnnpar.planner.planned import planned
from gnnpar.pricing.rates import NOMINAL, Rates
from gnnpar.track.jsonl import read_rows
from gnnpar.training.result.result import header
from worlds import run_world

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


TOPOLOGY = "topology=two_racks"


def network(*overrides: str) -> Links:
    found = world_of(compose(["launch=paced", *overrides])).links
    assert found is not None
    return found


def test_ranks_are_spread_over_hosts_in_order(capable: object) -> None:
    assert network("world_size=3").host_of == (0, 1, 2)
    assert network("world_size=5", "launch.hosts=2").host_of == (0, 0, 0, 1, 1)
    found = network("world_size=2", "launch.rate_gbps=0.5", "launch.burst_kib=64")
    assert (found.host_gbps, found.link_gbps, found.burst_kib) == ((0.5, 0.5), None, 64)
    assert network("launch.rate_gbps=1").burst_kib == 256
    assert network("launch.rate_gbps=0.2").burst_kib == 51
    assert network("launch.rate_gbps=0.001").burst_kib == 16
    assert found.describe() == "2 hosts x 0.5 Gbit/s"


def test_topology_gives_its_own_rates(capable: object) -> None:
    found = network(TOPOLOGY, "world_size=8", "launch.rate_gbps=7")
    assert (found.num_hosts, found.host_gbps) == (4, (1.0,) * 4)
    assert (found.gbps(0, 1), found.gbps(0, 2), found.gbps(3, 2)) == (1.0, 0.25, 1.0)
    assert network(TOPOLOGY, "world_size=4", "topology.host_gbps=null", "launch.rate_gbps=7").gbps(0, 1) == 7.0


def test_one_rank_has_no_link(capable: object) -> None:
    lone = world_of(compose(["launch=paced", "strategy=single"]))
    assert lone.links is None
    assert header(compose(["strategy=single"]), lone)["provenance"] == "measured"
    settings = compose(["launch=paced", "world_size=4", "threads_per_rank=1", "topology.cores=2"])
    assert world_of(settings).oversubscribed, "hosts made of one machine share its cores"


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        (("comm=threads",), "launch=paced needs comm=gloo: comm=threads sends nothing over its links"),
        (("launch.hosts=4",), "launch.hosts=4, but there are 2 ranks; set launch.hosts=2 or lower"),
        ((TOPOLOGY,), "topology=two_racks names 4 hosts for 2 ranks; set world_size"),
        ((TOPOLOGY, "world_size=4", "launch.hosts=3"), "launch.hosts=3, but topology=two_racks names 4"),
        (("launch.hosts=1",), "launch.hosts=1 must be a whole number >= 2 or auto"),
        (("launch.rate_gbps=0",), "launch.rate_gbps=0 must be a number > 0"),
        ((TOPOLOGY, "topology.host_gbps=[1,2]"), "topology: host_gbps has 2 hosts, but link_gbps 4; make them equal"),
        ((TOPOLOGY, "topology.host_gbps=null", "topology.link_gbps=null"), "topology: neither host_gbps nor link_gbps"),
        ((TOPOLOGY, "topology.link_gbps=[[null,1],[1]]"), "link_gbps 2"),
        ((TOPOLOGY, "topology.host_gbps=null", "topology.link_gbps=[[null,1],[1]]"), "link_gbps[1] has 1 entries"),
        ((TOPOLOGY, "topology.host_gbps=null", "topology.link_gbps=[[2,1],[1,null]]"), "link_gbps[0][0]=2"),
        ((TOPOLOGY, "topology.host_gbps=[1,fast]"), "topology.host_gbps="),
        ((TOPOLOGY, "topology.host_gbps=[1]", "topology.link_gbps=null"), "there is one host; name at least 2"),
    ],
)
def test_bad_paced_settings_are_one_line(capable: object, overrides: tuple[str, ...], line: str) -> None:
    with outcomes.refused(re.escape(line)):  # ConfigError, or a ValueError of the world
        network(*overrides)


def test_joined_ranks_of_a_paced_run_are_refused(capable: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="cannot join RANK's world; leave torchrun out"):
        network()


@pytest.mark.parametrize("lack", ["needs root to make network namespaces, this is user 1; run as root", "needs Linux"])
def test_paced_run_on_a_machine_without_tools_exits_with_two(
    lack: str, refused: Refused, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paced, "missing", lambda: lack)
    monkeypatch.setattr(processes, "start", lambda *_: pytest.fail("ranks were started"))
    refused(f"gnnpar: launch=paced {lack}, or set launch=local\n", "train", "launch=paced", "hydra.run.dir=run")
    assert not list(tmp_path.rglob("result.json"))


PATTERNS = {"one way": [(0, 3)], "both ways": [(0, 3), (3, 0)], "three to one": [(0, 3), (1, 3), (2, 3)]}
RATES, SECONDS, REPEATS = (0.2, 1.0), 0.4, 10


def test_missing_tools_are_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(namespaces.shutil, "which", lambda name, path: f"/sbin/{name}")
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    assert missing() is None
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert missing() == "needs root to make network namespaces, this is user 1000; run as root"
    assert paced.trial() == f"no: {missing()}"
    monkeypatch.setattr(namespaces.shutil, "which", lambda name, path: None if name == "tc" else name)
    assert missing() == "needs tc of iproute2, not found on PATH; install iproute2"
    monkeypatch.setattr(sys, "platform", "darwin")
    assert missing() == "needs Linux, this is darwin"


def test_link_rates_become_one_class_a_peer() -> None:
    plain = Network(host_gbps=(1.0, 0.5))
    assert plain.shape(1) == ["qdisc replace dev eth0 root tbf rate 500000000bit burst 256kb latency 20ms"]
    assert plain.gbps(0, 1) == 0.5
    linked = Network(host_gbps=(1.0,) * 3, link_gbps=((None, 0.25, None),) * 3, burst_kib=64)
    commands = linked.shape(0)
    (slow,) = [c for c in commands if "classid 1:3 " in c]
    assert "rate 250000000bit ceil 250000000bit burst 64kb" in slow
    assert sum(c.startswith("filter") for c in commands) == 2
    assert any("match ip dst 10.77.0.2/32 flowid 1:3" in c for c in commands)
    assert len({namespaces.address(i) for i in range(600)}) == 600


def test_network_that_cannot_be_built_is_one_line_and_leaves_nothing(shaped_links) -> None:
    links = Links(host_gbps=(1.0, 1e-10))  # 0 bit/s: tc refuses the second host
    kept = len(os.listdir("/proc/self/fd"))
    line = r"^launch=paced: `tc qdisc replace dev port1 .*` failed: .*; set launch=local"
    with pytest.raises(ValueError, match=line), paced.paced(links, 1, RunHooks()):
        pass
    assert len(os.listdir("/proc/self/fd")) == kept


@pytest.mark.slow
def test_topology_paces_each_link(shaped_links) -> None:
    """Host 0 reaches 1 at the hosts' rate and 2 at the link's; back from 2, nothing but the hosts limits."""
    links = Links(host_gbps=(0.4, 0.4, 0.2), link_gbps=((None, None, 0.05), (None,) * 3, (None,) * 3))
    with Network.built(links) as network:
        for source, target, gbps in ((0, 1, 0.4), (0, 2, 0.05), (2, 0, 0.2), (1, 2, 0.2)):
            assert network.gbps(source, target) == gbps
            best = max(paced.reached(network, source, target) for _ in range(2))
            assert 0.9 * gbps < best < 1.02 * gbps, (source, target)


@pytest.mark.slow  # a busy machine is slower than the link
def test_links_carry_their_rate_and_counters_agree(shaped_links) -> None:
    with Network.built(Links(host_gbps=(RATES[0],) * 4, host_of=(0, 1, 2, 3))) as network:
        ranks = run_world("gloo", 4, Transfers(network), network)
        outside = []
        for host in range(4):
            with namespaces.netns(network.namespaces[host]):
                outside.append(interface_sent_bytes())
    assert not any(os.path.exists(each) for each in network.namespaces)
    for gbps, (name, pairs) in product(RATES, PATTERNS.items()):
        runs = list(zip(*(rank[gbps, name] for rank in ranks), strict=True))
        for run in runs:
            per_pair = num_bytes(gbps, pairs)
            for rank, (_, sent, payload) in enumerate(run):
                assert payload == per_pair * sum(source == rank for source, _ in pairs), "what the ledger says"
                # acknowledgements go the other way: a host that sends nothing else sends those
                assert payload <= sent <= 1.05 * payload + 0.05 * per_pair, (gbps, name, rank)
        measured = [into_a_host(gbps, pairs) * 8e-9 / max(seconds for seconds, *_ in run) for run in runs]
        logging.info("%g Gbit/s, %s: %s", gbps, name, ", ".join(f"{rate:.3f}" for rate in measured))
        assert all(rate < 1.03 * gbps for rate in measured), (gbps, name, measured)  # the burst is 2 %
        assert max(measured) > 0.9 * gbps, (gbps, name, measured)
    for counters, rank in zip(outside, ranks, strict=True):
        assert counters >= sum(sent for runs in rank.values() for _, sent, _ in runs), "the same, seen from outside"


def into_a_host(gbps: float, pairs: list[tuple[int, int]]) -> int:
    """Bytes that each receiver of a pattern gets."""
    return num_bytes(gbps, pairs) * sum(target == 3 for _, target in pairs)


def num_bytes(gbps: float, pairs: list[tuple[int, int]]) -> int:
    """What each sender sends, so that a pattern takes SECONDS."""
    return int(SECONDS * gbps * 1e9 / 8) // sum(target == 3 for _, target in pairs)


@dataclass(frozen=True)
class Transfers:
    """{(rate, pattern): [(seconds until all had arrived, bytes on this host's interface, payload sent), ...]}.

    The rate of a link is the best of a few transfers: what else the machine does can slow one, nothing can speed it up.
    """

    network: Network

    def __call__(self, comm: Communicator) -> dict:
        found = {}
        for gbps, (name, pairs) in product(RATES, PATTERNS.items()):
            if comm.rank == 0:
                replace(self.network, host_gbps=(gbps,) * 4, burst_kib=paced.burst_kib(gbps)).pace()
            runs = found[gbps, name] = []
            while len(runs) < REPEATS:
                runs.append(transfer(comm, pairs, num_bytes(gbps, pairs)))
                seconds = comm.gather(runs[-1][0])
                if comm.broadcast(seconds and max(seconds) < into_a_host(gbps, pairs) * 8e-9 / gbps / 0.93):
                    break
        return found


def transfer(comm: Communicator, pairs: list[tuple[int, int]], nbytes: int) -> tuple[float, int, int]:
    outgoing = {t: torch.zeros(nbytes, dtype=torch.uint8) for s, t in pairs if s == comm.rank}
    expected = {s: nbytes for s, t in pairs if t == comm.rank}
    comm.barrier()
    comm.ledger.drain()
    counter, began = interface_sent_bytes(), time.perf_counter()
    for pending in comm.exchange(outgoing, expected, MessageTag(0, 0, 0, "forward")).values():
        pending.wait()
    seconds = time.perf_counter() - began
    comm.barrier()
    sent = interface_sent_bytes() - counter
    return seconds, sent, sum(comm.ledger.drain().bytes.values())
