"""Figures of studies: one look, and the same bytes from the same numbers."""

from contextlib import chdir
from pathlib import Path
from typing import Any


def pyplot(size: float = 9) -> Any:
    """matplotlib's, without a display. `size`: of letters, in points."""
    with chdir(Path(__file__).parent):  # matplotlib obeys a matplotlibrc of the working directory
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

    plt.rcParams.update(
        {"svg.hashsalt": "gnnpar", "axes.spines.top": False, "axes.spines.right": False, "font.size": size}
    )
    return plt


def save(figure: Any, file: Path) -> None:
    """Without the date, which would change with every drawing."""
    figure.savefig(file, metadata={"Date": None})
