"""The event simulator against hand-made timelines: fair shares, streams, latency, slowdown."""

from __future__ import annotations

import json
import random

import pytest

from gnnpar.pricing.simulate import fair_rates, simulate
from gnnpar.pricing.tasks import SimulatedTask


def compute(name: str, seconds: float, *after: int, device: int = 0, **more) -> SimulatedTask:
    return SimulatedTask(
        name=name, kind="compute", stream=("compute", device), devices=(device,), after=after, seconds=seconds, **more
    )


def flow(name: str, nbytes: float, links: list[int], *after: int, stream: object = None, **more) -> SimulatedTask:
    demand = dict.fromkeys(links, 1.0)
    return SimulatedTask(
        name=name, kind="flow", stream=stream or name, devices=(0, 1), after=after, nbytes=nbytes, demand=demand, **more
    )


@pytest.mark.parametrize(
    ("flows", "capacity", "rates"),
    [
        ([[0], [0]], [10], [5, 5]),
        ([[0], [0, 1]], [10, 3], [7, 3]),
        ([[0], [0, 1], [1]], [10, 4], [8, 2, 2]),
        ([[0, 1], [0], [1], [1]], [9, 6], [2, 7, 2, 2]),
        ([[0, 1, 2], [0], [1], [2]], [1, 1, 1], [0.5, 0.5, 0.5, 0.5]),
        ([[]], [], [float("inf")]),
    ],
)
def test_max_min_golden(flows: list[list[int]], capacity: list[float], rates: list[float]) -> None:
    assert fair_rates([dict.fromkeys(f, 1.0) for f in flows], capacity) == pytest.approx(rates)


def test_max_min_property() -> None:
    """No link is overfull, and every flow has a full link on which nobody is faster: the definition."""
    rng = random.Random(0)
    for _ in range(200):
        capacity = [rng.uniform(1, 10) for _ in range(5)]
        flows = [{link: rng.choice([1.0, 1.5]) for link in rng.sample(range(5), rng.randint(1, 3))} for _ in range(7)]
        rates = fair_rates(flows, capacity)
        load = [sum(r * f.get(link, 0) for r, f in zip(rates, flows, strict=True)) for link in range(5)]
        assert all(used <= cap * (1 + 1e-9) for used, cap in zip(load, capacity, strict=True))
        for rate, mine in zip(rates, flows, strict=True):
            full = [link for link in mine if load[link] >= capacity[link] * (1 - 1e-9)]
            assert any(rate >= max(r for r, f in zip(rates, flows, strict=True) if link in f) - 1e-9 for link in full)


def test_two_flows_of_the_specification() -> None:
    """100 B and 50 B over a shared link of 10 B/s, the second also over one of 3 B/s."""
    ends = [s.end for s in simulate([flow("a", 100, [0]), flow("b", 50, [0, 1])], [10, 3]).spans]
    assert ends == pytest.approx([100 / 7, 50 / 3])
    assert ends == pytest.approx([14.286, 16.667], abs=1e-3)


def test_a_stream_serialises_and_latency_comes_first() -> None:
    line = simulate([flow("a", 10, [0], stream="s", latency=1), flow("b", 10, [0], stream="s", latency=1)], [10])
    assert [tuple(s) for s in line.spans] == [(0, 2), (1, 3)]  # the second's latency passes beside the first
    line = simulate([compute("a", 3), compute("b", 1), compute("c", 1, priority=-1), compute("d", 1, device=1)], [])
    assert [tuple(s) for s in line.spans] == [(0, 3), (4, 5), (3, 4), (0, 1)]  # a began before c was known


def test_computing_is_slower_beside_flows() -> None:
    line = simulate([compute("a", 4), flow("b", 20, [0])], [10], slowdown=2)
    assert line.spans[0].end == pytest.approx(5)  # 2 s at half speed, 3 at full


def test_the_trace_is_json() -> None:
    tasks = [compute("a", 1), flow("b", 30, [0, 1], 0), flow("c", 20, [1], 0), compute("d", 1, 1, 2, device=1)]
    line = simulate(tasks, [10, 10])
    events = json.loads(json.dumps(line.chrome_trace()))["traceEvents"]
    complete = [e for e in events if e["ph"] == "X"]
    assert sorted(e["name"] for e in complete) == ["a", "b (30 B)", "c (20 B)", "d"]
    assert sum(e["dur"] for e in complete if e["cat"] == "compute") == pytest.approx(2e6)
    assert line.seconds == pytest.approx(1 + 5 + 1)


def test_a_circle_is_refused() -> None:
    with pytest.raises(ValueError, match="2 tasks wait for each other, a among them"):
        simulate([compute("a", 1, 1), compute("b", 1, 0)], [])


def test_speed() -> None:
    """A pipeline of 8 stages and 64 chunks: thousands of events in well under a second of work."""
    tasks, number = [], {}
    for k in range(64):
        for s in range(8):
            after = [number[s, k - 1]] if k else []
            if s:
                number["link", s, k] = len(tasks)
                tasks.append(flow(f"x{s},{k}", 10, [s], number[s - 1, k], stream=("x", s)))
                after.append(number["link", s, k])
            number[s, k] = len(tasks)
            tasks.append(compute(f"F{s},{k}", 1.0, *after, device=s))
    line = simulate(tasks, [100.0] * 8)
    assert line.seconds == pytest.approx(8 * 1.0 + 7 * 0.1 + 63 * 1.0)
