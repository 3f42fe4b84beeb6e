"""Memory of partitioning, loading and training: table and figure."""

from collections.abc import Iterator

import reports
from records import Files

GIB = 2**30
COLOURS = {"parent": "#999999", "rank 0": "#0072b2", "rank 1": "#d55e00"}
RESIDENT, ANONYMOUS, _, PROPORTIONAL = range(4)
STEPS = ("partition", "from shards", "from memory")


def roles(row: dict) -> list[str]:
    """Processes that do the work: ranks where there are any."""
    ranks = sorted(role for role in row["peaks"] if role.startswith("rank"))
    return ranks or ["parent"]


def loading(row: dict, role: str) -> float:
    """Largest anonymous GiB of a rank before its first epoch."""
    early = [told for second, told in row["samples"] if role in told and second < row["trains_after"]]
    return max(told[role][ANONYMOUS] for told in early) / GIB


def memory(rows: dict[str, dict]) -> Iterator[list[str]]:
    for step in STEPS:
        row = rows[step]
        name = step if row["ended"] == 0 else f"{step} (ended at {row['limit_gib']:g} GiB)"
        for role in roles(row):
            peak = [f"{each / GIB:.2f}" for each in row["peaks"][role]]
            early = f"{loading(row, role):.2f}" if "trains_after" in row else ""
            yield [name, role, peak[ANONYMOUS], early, peak[RESIDENT], peak[PROPORTIONAL]]


def draw(rows: dict[str, dict], files: Files) -> None:
    plt = reports.pyplot()
    figure, axes = plt.subplots(1, 3, figsize=(9, 3), sharey=True, layout="constrained")
    for axis, step in zip(axes, STEPS, strict=True):
        row = rows[step]
        for role in ["parent", *(r for r in roles(row) if r != "parent")]:
            points = [(second, told[role]) for second, told in row["samples"] if role in told]
            seconds = [second for second, _ in points]
            for which, style in ((ANONYMOUS, "-"), (RESIDENT, ":")):
                label = role if which == ANONYMOUS else None
                axis.plot(seconds, [told[which] / GIB for _, told in points], style, color=COLOURS[role], label=label)
        if "trains_after" in row:
            axis.axvline(row["trains_after"], color="0.8", lw=1, zorder=0)
        axis.set(title=step, xlabel="seconds")
    axes[0].set_ylabel("GiB (dotted: mapped files too)")
    axes[2].legend(frameon=False, fontsize=8)
    reports.save(figure, files.figure)


def report(files: Files) -> None:
    rows = {row["step"]: row for row in files.read()}
    shards, beside = rows["from shards"], rows["from memory"]
    same = "losses" in beside and (shards["losses"], shards["hashes"]) == (beside["losses"], beside["hashes"])
    heads = ("step", "process", "anonymous, GiB", "before epoch 0", "resident, files too", "proportional (PSS)")
    print(reports.table(heads, memory(rows)), end="\n\n")
    losses = ", ".join(f"{loss:.6f}" for loss in shards["losses"])
    print(reports.table(("equal losses and hashes", "yes" if same else "no"), [("losses", losses)]))
    draw(rows, files)
