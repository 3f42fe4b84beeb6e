"""The figure: memory of a rank and bytes of all against the number of ranks; dashed: 1/N of one rank."""

import reports
from records import Files

from gnnpar.config.study import Study
from gnnpar.report.columns import MEASURES, Runs

COLOURS = {"graph_parallel": "#2b7bba", "graph_parallel bf16": "#7a8794", "sar": "#1a9e77", "adaqp": "#e09f1f"}


def draw(files: Files, _name: str, _: Study, runs: Runs) -> None:
    plt = reports.pyplot(8)
    figure, panels = plt.subplots(1, 2, figsize=(7, 3), layout="constrained")
    for axes, measure, label in zip(
        panels, ("peak_mib", "sent_mib"), ("peak of a rank, MiB", "sent an epoch, MiB"), strict=True
    ):
        found = {place: MEASURES[measure].of(results[max(results)]) for place, results in runs.items()}  # last block
        one = [found["1", "single"]] * (measure == "peak_mib")
        if one:
            axes.plot([1, 8], [one[0], one[0] / 8], "--", color="#5a6572", linewidth=0.7)
        for name, colour in COLOURS.items():
            values = [*one, *(found[ranks, name] for ranks in "248")]
            axes.plot([1, 2, 4, 8][-len(values) :], values, "o-", color=colour, label=name, markersize=3)
        axes.set(xscale="log", yscale="log", xlabel="ranks", ylabel=label)
    for axes in panels:
        axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        axes.minorticks_off()
    panels[0].legend(frameon=False)
    reports.save(figure, files.figure)
