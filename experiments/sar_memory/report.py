"""Raw lines that do not name their job, and the figure."""

from collections.abc import Mapping

import reports
from records import Files

from gnnpar.config.study import Study
from gnnpar.report.columns import Runs

COLOURS = ("#d55e00", "#0072b2", "#56b4e9", "#009e73")


def job(row: Mapping[str, object]) -> str:
    return row.get("job") or "{model}; {cut}; {ranks}; {variant}".format(**row)


def draw(files: Files, _: str, study: Study, runs: Runs) -> None:
    plt = reports.pyplot()
    figure, axes = plt.subplots(2, 2, figsize=(7.5, 6), sharex=True, layout="constrained")
    panels = [(model, cut) for model in study.axes["model"] for cut in study.axes["cut"]]
    for axis, (model, cut) in zip(axes.flat, panels, strict=True):
        whole = reports.measured(study, runs, "own_mib", model, cut, "1", "graph_parallel")
        for k, style in ((1, "-"), (2, "--"), (3, ":")):
            axis.plot([k, 8], [whole, k / 8 * whole], style, color="0.7", lw=1, label=f"{k}/N of N = 1")
        for method, colour in zip(study.methods, COLOURS, strict=True):
            if (model, cut, "8", method) in runs:
                values = [reports.measured(study, runs, "own_mib", model, cut, n, method) for n in "1248"]
                axis.plot((1, 2, 4, 8), values, "o-", color=colour, ms=4, label=method)
        axis.set(xscale="log", yscale="log", title=f"{model}, {cut} cut")
        axis.set_xticks((1, 2, 4, 8), list("1248"))
        axis.set_yticks((12, 25, 50, 100), ["12", "25", "50", "100"])
        axis.minorticks_off()
    for axis in axes[1]:
        axis.set_xlabel("ranks N")
    for axis in axes[:, 0]:
        axis.set_ylabel("MiB of a rank at its peak")
    axes[0, 0].legend(frameon=False, fontsize=7)
    reports.save(figure, files.figure)
