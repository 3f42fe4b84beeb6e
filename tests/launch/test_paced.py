"""launch=paced from settings: which rank lives where, and what is refused before any rank starts."""

from pathlib import Path

import pytest

from conftest import Refused
from gnnpar.comm.world import Links
from gnnpar.config.compose import compose
from gnnpar.launch import processes
from gnnpar.launch.emulated import paced
from gnnpar.launch.launch import world_of
from gnnpar.training.result.result import header

TOPOLOGY = "topology=two_racks"


@pytest.fixture(autouse=True)
def _can(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this machine could: nothing here builds a network."""
    monkeypatch.setattr(paced, "missing", lambda: None)


def network(*overrides: str) -> Links:
    found = world_of(compose(["launch=paced", *overrides])).links
    assert found is not None
    return found


def test_ranks_are_spread_over_hosts_in_order() -> None:
    assert network("world_size=3").host_of == (0, 1, 2)
    assert network("world_size=5", "launch.hosts=2").host_of == (0, 0, 0, 1, 1)
    found = network("world_size=2", "launch.rate_gbps=0.5", "launch.burst_kib=64")
    assert (found.host_gbps, found.link_gbps, found.burst_kib) == ((0.5, 0.5), None, 64)
    assert network("launch.rate_gbps=1").burst_kib == 256
    assert network("launch.rate_gbps=0.2").burst_kib == 51
    assert network("launch.rate_gbps=0.001").burst_kib == 16
    assert found.describe() == "2 hosts x 0.5 Gbit/s"


def test_topology_gives_its_own_rates() -> None:
    found = network(TOPOLOGY, "world_size=8", "launch.rate_gbps=7")
    assert (found.num_hosts, found.host_gbps) == (4, (1.0,) * 4)
    assert (found.gbps(0, 1), found.gbps(0, 2), found.gbps(3, 2)) == (1.0, 0.25, 1.0)
    assert network(TOPOLOGY, "world_size=4", "topology.host_gbps=null", "launch.rate_gbps=7").gbps(0, 1) == 7.0


def test_one_rank_has_no_link() -> None:
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
def test_bad_paced_settings_are_one_line(overrides: tuple[str, ...], line: str) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011  # ConfigError, or a ValueError of the world
        network(*overrides)
    assert line in str(error.value)
    assert "\n" not in str(error.value)


def test_joined_ranks_of_a_paced_run_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
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
