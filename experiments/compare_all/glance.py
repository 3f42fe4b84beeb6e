"""The table to begin with: what each strategy costs beside vanilla, and whether its accuracy is that of `single`."""

from collections.abc import Callable, Mapping

from compare_all.cells import LINKS, VERDICTS, Cell, Cells, Row, Rows, counts, judged, methods_of, ratios

from gnnpar.report.statistics import geometric_mean, mean

NOTE = """Speed (times faster), bytes and memory beside vanilla, means over models. Accuracy: cells, by what paired
differences to `single` say of a loss of 0.3 points, corrected over the cells of a strategy (Holm); those whose control
passes too are in none of the three. Gradient: from the best cell to the worst. What was not timed here has its bytes
from studies over seeds, beside `graph_parallel` on as many ranks; the rivals were timed in `experiments/rivals`.
"""
HEADINGS = (
    "strategy",
    "exactness",
    *(f"speed, {link}" for link in LINKS.values()),
    "sent",
    "peak/rank",
    *VERDICTS,
    "gradient error",
)


def sent(row: Row) -> float:
    """Bytes an epoch, over all ranks."""
    return row["result"]["bytes_per_epoch"]["total"]


def peak(row: Row) -> float:
    """Bytes of the rank that needs most."""
    return max(row["result"]["memory_bytes"]["peak"])


def lines(timed: Cells, trained: Cells) -> list[list[str]]:
    """A line a method; a cached first layer is left out, as its baseline is another.

    Speeds, bytes and memory are those of vanilla times what is shown, means over models (speeds geometric; none of
    mini-batches, whose epoch is other work); cells of accuracy are counted, unfit ones left out.
    """
    both: dict[Cell, Mapping[str, Rows]] = {**timed, **trained}
    found = []
    for name in (n for n in methods_of(both) if "cached" not in n):
        first = next(methods[name][0] for methods in both.values() if name in methods)
        verdicts = counts([verdict for verdict, _ in judged(trained, name).values()], VERDICTS)
        is_timed = any(name in methods for methods in timed.values())
        bytes_sent = _share(timed, name, sent) if is_timed else _sent_over_seeds(trained, name)
        costs = [*(_speed(timed, name, study) for study in LINKS), bytes_sent, _share(timed, name, peak)]
        found.append([name, ", ".join(first["result"]["exactness"]), *costs, *verdicts, _error(trained, name)])
    return found


def _speed(cells: Cells, name: str, study: str) -> str:
    beside = [ratios(m.get(name, ()), m.get("vanilla", ())) for (where, _), m in cells.items() if where.endswith(study)]
    means = [geometric_mean(found).value for found in beside if found]
    return f"{geometric_mean(means).value:.2f}" if means and "minibatch" not in name else "-"


def _share(cells: Cells, name: str, of: Callable[[Row], float], *, base: str = "vanilla") -> str:
    shares = [
        mean([of(row) for row in methods[name]]).value / mean([of(row) for row in methods[base]]).value
        for methods in cells.values()
        if {name, base} <= methods.keys()
    ]
    return f"{mean(shares).value:.2f}" if shares else "-"


def _sent_over_seeds(cells: Cells, name: str) -> str:
    """Beside `graph_parallel` on as many ranks, which sends what vanilla does."""
    base = "graph_parallel"
    comparable = {
        cell: methods
        for cell, methods in cells.items()
        if {name, base} <= methods.keys() and _ranks(methods[name]) == _ranks(methods[base])
    }
    return _share(comparable, name, sent, base=base)


def _ranks(rows: Rows) -> int:
    return rows[0]["result"]["world_size"]


def _error(cells: Cells, name: str) -> str:
    """Of the gradient beside the exact one, at the same weights: from the best cell to the worst."""
    means = []
    for methods in cells.values():
        probes = [row["result"]["fidelity"] for row in methods.get(name, ())]
        if errors := [probe["relative_error"]["mean"] for probe in probes if probe]:
            means.append(mean(errors).value)
    return " to ".join(dict.fromkeys(f"{end(means):.2g}" for end in (min, max))) if means else "-"
