"""Figures of studies: one look, and the same bytes from the same numbers."""

import math
from contextlib import chdir
from pathlib import Path
from typing import Any

from gnnpar.config.study import Study
from gnnpar.report.columns import Cell, Runs, Samples
from gnnpar.report.statistics import Estimate


def pyplot(size: float = 9) -> Any:
    """matplotlib's, without a display. `size`: of letters, in points."""
    with chdir(Path(__file__).parent):  # matplotlib obeys a matplotlibrc of the working directory
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

    plt.rcParams.update(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": "gnnpar",
            "axes.spines.top": False,
            "axes.spines.right": False,
            "font.size": size,
        }
    )
    return plt


def save(figure: Any, file: Path) -> None:
    """Without the date, which would change with every drawing."""
    figure.savefig(file, metadata={"Date": None})


def measured(study: Study, runs: Runs, expression: str, *place: str) -> float:
    """The value of a column's expression for the job at this place; NaN without one."""
    value = Cell(study, runs, study.named(place)).value(expression)
    found = value.estimate() if isinstance(value, Samples) else value
    return found.value if isinstance(found, Estimate) else found if isinstance(found, float) else math.nan
