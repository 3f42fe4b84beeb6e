"""Every convolution of PyG with its options, as data, and the table of what trains as in PyG and what is refused.

Run as a program with --write, the table goes into docs/guide/pyg.md.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parents[2]
if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / name) for name in ("tests", "src", "kernels")]

from conformance.generated_nets import TARGET, build, kwargs_of, split  # noqa: E402 - the paths above
from conformance.plain_loop import STRATEGIES, Verdict, graph, plain, verdict  # noqa: E402

PAGE = ROOT / "docs" / "guide" / "pyg.md"
BEGIN, END = "<!-- convolutions:begin -->", "<!-- convolutions:end -->"

VARIANTS = (ROOT / "tests" / "conformance" / "convolutions.txt").read_text(encoding="utf-8").splitlines()
"""A line a variant, from 8 to 8 columns: constructor; call, if it is not conv(x, edge_index). w, a, t: with
edge_weight, edge_attr [E, 4], edge_type. mlp(i, o): two dense layers."""
SAMPLE = VARIANTS[::9]


def verdicts(variant: str, *, strategies: tuple[str, ...] = tuple(STRATEGIES)) -> dict[str, Verdict]:
    """By strategy, the worse of a clean and a dirty graph; none where PyG itself cannot run it."""
    found: dict[str, Verdict] = {}
    spec = {"layers": [{"conv": variant}], "seed": 1}
    for dirty in (False, True):
        data = graph(seed=int(dirty), dirty=dirty, edges=split(variant)[2])
        try:
            due = plain(lambda: build(**kwargs_of(spec)), data)
        except (ImportError, ValueError, RuntimeError, AttributeError, IndexError, TypeError):
            continue
        for strategy in strategies:
            world = 1 if strategy in ("single", "gnnpipe") else 2
            now = verdict(TARGET, kwargs_of(spec), data, strategy, world, due, auto=True)
            if strategy not in found or found[strategy].kind == "equal" or not now.good:
                found[strategy] = now
    return found


def table(strategies: tuple[str, ...] = tuple(STRATEGIES)) -> str:
    """Markdown: a row a convolution, in a cell how many of its variants are equal or refused, if not all are equal."""
    rows: dict[str, list[dict[str, Verdict]]] = {}
    for variant in VARIANTS:
        rows.setdefault(variant.partition("(")[0], []).append(verdicts(variant, strategies=strategies))
    lines = [f"| convolution | variants | {' | '.join(strategies)} |", f"|{'---|' * (len(strategies) + 2)}"]
    for name, found in rows.items():
        cells = [_cell([each[strategy] for each in found if each], len(found)) for strategy in strategies]
        lines.append(f"| `{name}` | {len(found)} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _cell(found: list[Verdict], variants: int) -> str:
    if not found:
        return "not tried"
    counts = Counter({"late": "refused"}.get(each.kind, each.kind) for each in found)  # by a rank, in a line as well
    if set(counts) == {"equal"} and len(found) == variants:
        return "equal"
    return ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))


def main() -> None:
    page, made = PAGE.read_text(), table()
    sys.stdout.write(f"{made}\n")
    if "--write" in sys.argv:
        before, _, rest = page.partition(BEGIN)
        PAGE.write_text(f"{before.rstrip()}\n\n{BEGIN}\n{made}\n{END}\n{rest.partition(END)[2].lstrip()}")


if __name__ == "__main__":
    main()
