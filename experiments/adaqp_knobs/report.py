"""The figure: gradient error against bytes, what a knob moves along the curve, and what moves off it."""

import reports
from records import Files

from gnnpar.config.study import Study
from gnnpar.report.columns import Runs

SENT = "bytes_per_epoch.total{0} - bytes_per_epoch.reduce{0}"
SHARE = f"average(({SENT.format('')}) / ({SENT.format('(exact)')}))"
FAMILIES = {
    "uniform": ("#7a8794", "s"),
    "lambda": ("#2b7bba", "o"),
    "group": ("#1a9e77", "D"),
    "period": ("#e09f1f", "v"),
}


def draw(files: Files, name: str, study: Study, runs: Runs) -> None:
    if name != "seeds":
        return
    plt = reports.pyplot(10)
    figure, axis = plt.subplots(figsize=(6, 4), layout="constrained")
    at = {
        job: tuple(reports.measured(study, runs, each, job) for each in (SHARE, "fidelity.relative_error.mean"))
        for job in study.methods
    }
    axis.plot(*at["adaptive"], "k*", markersize=12)
    axis.annotate("adaptive", at["adaptive"], xytext=(6, 4), textcoords="offset points")
    for family, (colour, mark) in FAMILIES.items():
        jobs = [job for job in at if job.startswith(family)]
        axis.plot(*zip(*(at[job] for job in jobs), strict=True), mark, color=colour)
        for job in jobs:
            axis.annotate(job, at[job], xytext=(6, -3), textcoords="offset points", color=colour, fontsize=8)
    axis.plot(*at["random"], "x", color="#b04040")
    axis.annotate("random", at["random"], xytext=(6, 4), textcoords="offset points", color="#b04040", fontsize=8)
    axis.set(xlabel="bytes sent, of fp32", ylabel="relative error of the gradient", yscale="log")
    reports.save(figure, files.figure)
