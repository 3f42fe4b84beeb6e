"""Max-min fair rates of flows over shared links, by progressive filling.

Every flow's rate grows at the same pace until a link on its way is full; the flows of that link are then fixed and the
others grow on. A flow that passes a link `demand` times (a ring collective) takes that much of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

Demand = Mapping[int, float]


def fair_rates(flows: Sequence[Demand], capacity: Sequence[float]) -> list[float]:
    """Rate of each flow. flows[i]: link -> demand; a flow over no link is infinitely fast."""
    rates = [0.0 if flow else float("inf") for flow in flows]
    growing = {i for i, flow in enumerate(flows) if flow}
    left = {link: capacity[link] for flow in flows for link in flow}
    while growing:
        load: dict[int, float] = {}
        for i in growing:
            for link, demand in flows[i].items():
                load[link] = load.get(link, 0.0) + demand
        step = min(left[link] / demand for link, demand in load.items())
        if step == float("inf"):
            for i in growing:
                rates[i] = step
            break
        full = {link for link, demand in load.items() if left[link] / demand <= step * (1 + 1e-12)}
        for link, demand in load.items():
            left[link] = max(0.0, left[link] - step * demand)
        for i in growing:
            rates[i] += step
        growing = {i for i in growing if not any(link in full for link in flows[i])}
    return rates
