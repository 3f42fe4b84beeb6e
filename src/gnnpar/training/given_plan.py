"""The plan of plan=FILE, which may have been edited by hand: whatever it says has an effect, or is refused in one line.

Layers in plan.json of 0.1.0 decided nothing: they are read where they say what the strategy runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gnnpar.parallel.strategy import Strategy, check_plan
from gnnpar.placement import Plan, clear
from gnnpar.settings import Settings, instantiate
from gnnpar.targets import refuse_foreign

_LAYER = {  # of plan.json of 0.1.0, where a layer did not say it
    "codec": None,
    "overlap": "edges",
    "remat": False,
    "rounds": None,
    "prefetch": None,
    "backward": None,
    "boundary": None,
}


def given_plan(file: Path, settings: Settings) -> Plan:
    """The plan of plan=FILE, compared with the strategy that it names: nothing in it is without effect.

    Raises ValueError in one line where the strategy cannot run it, or where a field says what does not run.
    """
    data, plan = Plan.data(file), Plan.load(file)
    plan.verify()
    check_plan(settings.strategy, plan)
    if unknown := sorted(plan.setup.keys() - settings.resolved.keys() - {"names"}):
        raise ValueError(f"plan={file}: nothing reads setup.{unknown[0]}; remove it")
    if "layers" in data:
        refuse_foreign(data["layers"], f"plan={file}", remedy="--trust runs its code", named=settings.resolved)
        check_layers(data["layers"], settings.strategy, plan, file)
    return plan


def check_layers(layers: Any, strategy: Strategy, plan: Plan, file: Path) -> None:  # Any: JSON
    """Refuse `layers` of a plan.json of 0.1.0, which decided nothing, where they say something else than what runs."""
    with clear(file):
        if len(layers) != plan.num_layers:
            raise ValueError(
                f"plan={file}: layers has {len(layers)} entries, but layers_of ends with layer {plan.num_layers}: "
                "layers decide nothing; remove them"
            )
        for i, (layer, facts) in enumerate(zip(layers, strategy.describe(plan), strict=True)):
            runs = {**_LAYER, "mode": facts.mode, **facts.settings}
            for key, value in layer.items():
                if key not in runs:
                    raise ValueError(f"plan={file}: nothing reads layers[{i}].{key}; remove layers")
                asked = instantiate(value) if isinstance(value, Mapping) else value
                if asked != runs[key]:
                    where = f"edit strategy.{key}" if key in plan.strategy else "change strategy"
                    raise ValueError(
                        f"plan={file}: layers[{i}].{key} is {asked}, but the strategy runs {runs[key]}: layers decide "
                        f"nothing; remove them, and {where}"
                    )
