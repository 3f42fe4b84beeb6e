"""How many cells of a cluster in slow motion keep what was asked: quotients in a block, dilated by D over D = 1."""

from collections.abc import Mapping

import reports
from records import Files
from reports import Measured

BASE = "gcn vanilla"
EPOCH = "epoch_s({d}) / epoch_s(D1)"
TIMES = f"epoch_s('{BASE}', {{d}}) / epoch_s('{BASE}', D1) / ({EPOCH})"
ASKED = {  # column -> its expression, what it is less, the limit
    "epochs within 10%": (EPOCH, 1.0, 0.10),
    "ratios within 5%": (TIMES, 1.0, 0.05),
    "shares within 5 points": ("share({d}) - share(D1)", 0.0, 5.0),
}


def job(row: Mapping[str, str]) -> str:
    rate, dilation, method = row["job"].split(" ", 2)
    return f"{rate} D{dilation.removeprefix('D')} {method}"


def before(files: Files, measured: Measured) -> str:
    """Return a line a dilation: cells within each limit, and the largest deviation."""
    study, runs = measured["results"]
    lines = []
    for dilation in (d for d in study.axes["dilation"] if d != "D1"):
        line = [dilation[1:]]
        for expression, less, limit in ASKED.values():
            names = [name for name in study.methods if name != BASE or expression != TIMES]
            text = expression.format(d=dilation)
            places = [(rate, "D1", name) for rate in study.axes["rate"] for name in names]
            values = [reports.measured(study, runs, text, *place) - less for place in places]
            worst = max(values, key=abs)
            kept = sum(abs(value) <= limit for value in values)
            line += [f"{kept} of {len(values)}", f"{100 * worst:+.0f}%" if less else f"{worst:+.1f}"]
        lines.append(line)
    return reports.table(["D", *(each for head in ASKED for each in (head, "largest"))], lines) + "\n"
