"""Shaped links between namespaces: names that cannot be mistaken, the rate that was set, and bytes that agree."""

import logging
import os
import sys
import time
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch

from comm_bodies import MESSAGE_TAG
from gnnpar.comm import Communicator
from gnnpar.comm.world import Links, RunHooks
from gnnpar.launch.emulated import namespaces, paced
from gnnpar.launch.emulated.namespaces import Network, interface_sent_bytes, missing
from worlds import run_world

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
    for pending in comm.exchange(outgoing, expected, MESSAGE_TAG).values():
        pending.wait()
    seconds = time.perf_counter() - began
    comm.barrier()
    sent = interface_sent_bytes() - counter
    return seconds, sent, sum(comm.ledger.drain().bytes.values())
