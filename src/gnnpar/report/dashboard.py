"""A shared wandb workspace and a report that compare the strategies of a study, as specifications made offline. Built
by the `wandb-workspaces` package (extra [dashboard]). A panel shows only metrics that the runs have logged."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from gnnpar.files import JsonDict
from gnnpar.report.exports import Table, as_markdown
from gnnpar.track.keys import BYTE_PHASES, PHASES
from gnnpar.track.text import one_line
from gnnpar.track.wandb import AXES, GIGABYTES


@dataclass(frozen=True)
class Panel:
    """One plot. `kind`: a line against `x`, or bars of the last values."""

    title: str
    y: tuple[str, ...]
    x: str = "epoch"
    kind: Literal["line", "bars"] = "line"


Built = Any  # Any: of wandb-workspaces, an optional extra

AGAINST = {"training seconds": "against_seconds", "gigabytes sent": "against_gigabytes"}
SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Convergence": (
        Panel("training loss, by epoch", ("loss/train",)),
        Panel("validation, by epoch", ("metric/val",)),
        Panel("test, by epoch", ("metric/test",)),
        *(Panel(f"training loss, by {what}", (f"{name}/loss/train",), AXES[name]) for what, name in AGAINST.items()),
        *(Panel(f"validation, by {what}", (f"{name}/metric/val",), AXES[name]) for what, name in AGAINST.items()),
    ),
    "Time": (
        Panel("seconds an epoch", ("time/epoch_seconds",)),
        *(Panel(f"{phase} seconds an epoch", (f"time/{phase}_seconds",), kind="bars") for phase in PHASES),
        Panel("seconds with a transfer in flight", ("time/comm_total_seconds",), kind="bars"),
    ),
    "Communication": (
        Panel("gigabytes sent so far", (GIGABYTES,)),
        Panel("bytes an epoch", ("comm/total_bytes",), kind="bars"),
        *(Panel(f"{phase} bytes an epoch", (f"comm/{phase}_bytes",), kind="bars") for phase in BYTE_PHASES),
        Panel("messages an epoch", ("comm/messages",), kind="bars"),
    ),
    "Memory": (
        Panel("peak bytes by rank", ("memory/peak_bytes/*",), kind="bars"),
        Panel("live bytes by category", ("memory/live_bytes/*",), kind="bars"),
    ),
    "Fidelity": (
        Panel("cosine with the exact gradient", ("fidelity/cosine",)),
        Panel("relative error of the gradient", ("fidelity/relative_error",)),
    ),
}


def panels_for(logged: Iterable[str]) -> dict[str, list[Panel]]:
    """Return the sections without panels that no run has logged; `name/*` stands for every metric below it."""
    known = sorted(set(logged))
    sections: dict[str, list[Panel]] = {}
    for name, panels in SECTIONS.items():
        for panel in panels:
            y = tuple(m for wanted in panel.y for m in known if fnmatchcase(m, wanted))
            if y and (panel.kind == "bars" or panel.x in known):
                sections.setdefault(name, []).append(Panel(panel.title, y, panel.x, panel.kind))
    return sections


def workspace(sections: dict[str, list[Panel]], *, entity: str, project: str, study: str) -> Built:
    """Return a saved view of the study's runs, grouped by strategy."""
    import wandb_workspaces.workspaces as ws

    return ws.Workspace(
        entity=entity,
        project=project,
        name=f"gnnpar {study}",
        sections=[ws.Section(name=key, panels=[*map(plot, panels)], is_open=True) for key, panels in sections.items()],
        runset_settings=ws.RunsetSettings(filters=of_study(study), groupby=[ws.Metric("JobType")]),
    )


def report(sections: dict[str, list[Panel]], table: Table, *, entity: str, project: str, study: str) -> Built:
    """Return a report of the table and the same panels."""
    import wandb_workspaces.reports.v2 as wr

    blocks: list[Built] = [wr.MarkdownBlock(as_markdown(table).rstrip("\n"))]
    for name, panels in sections.items():
        # without entity and project, a run set belongs to the report's project
        runs = wr.Runset(name=study, filters=of_study(study), groupby=["JobType"])  # pyright: ignore[reportPrivateImportUsage]
        blocks += [wr.H2(name), wr.PanelGrid(runsets=[runs], panels=list(map(plot, panels)))]
    return wr.Report(  # pyright: ignore[reportPrivateImportUsage]
        project=project,
        entity=entity,
        title=f"gnnpar {study}",
        description="Strategies of a study, side by side",
        blocks=blocks,
    )


def of_study(study: str) -> Built:
    """Return a filter by study. Raises ValueError for characters that wandb's expressions do not allow."""
    from wandb_workspaces import expr

    if odd := "".join(sorted({c for c in study if c in "'\"\\=<>" or not c.isprintable()})):
        raise ValueError(f"study {one_line(study)}: {odd!a} cannot be in the name of a group that wandb filters by")

    return expr.And(expr.Metric("Group") == study)


def plot(panel: Panel) -> Built:
    import wandb_workspaces.reports.v2 as wr

    if panel.kind == "bars":
        return wr.BarPlot(title=panel.title, metrics=list(panel.y))
    return wr.LinePlot(title=panel.title, x=panel.x, y=list(panel.y), title_x=panel.x)


def specification(thing: Built) -> JsonDict:
    """Return a workspace or a report as the data for the server."""
    return thing._to_model().model_dump(mode="json", by_alias=True)
