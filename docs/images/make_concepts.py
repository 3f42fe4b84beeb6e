"""Draw the four figures of docs/concepts.md: the law, exactness, staleness, bytes.

    python docs/images/make_concepts.py [FOLDER]

Colours are classes of a style sheet in each file, which follows the reader's light or dark setting.
"""

from __future__ import annotations

import sys
from pathlib import Path

STYLE = """
text { font: 13px system-ui, sans-serif; fill: #1b2026; } .small { font-size: 11.5px; fill: #5a6572; }
.box { fill: #f6f7f9; stroke: #8b949d; } .own { fill: #2b7bba; } .halo { fill: #d1602b; } .none { fill: #e9ecf0; }
.line { stroke: #5a6572; stroke-width: 1.4; fill: none; } .late { stroke: #d1602b; stroke-width: 1.8; fill: none; }
.on { fill: #ffffff; }
@media (prefers-color-scheme: dark) {
  text { fill: #e4e8ec; } .small { fill: #98a4b1; } .box { fill: #1c2128; stroke: #5a6572; } .none { fill: #2f3740; }
  .line { stroke: #98a4b1; } .late { stroke: #e0703c; } .on { fill: #ffffff; }
}
"""


def text(x: float, y: float, words: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{words}</text>'


def box(x: float, y: float, width: float, height: float, kind: str = "box") -> str:
    return f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" class="{kind}"/>'


def arrow(x0: float, y0: float, x1: float, y1: float, kind: str = "line") -> str:
    return f'<path d="M{x0:g} {y0:g} L{x1:g} {y1:g}" class="{kind}" marker-end="url(#tip)"/>'


def picture(title: str, width: int, height: int, *parts: str) -> str:
    tip = '<path d="M0 0 L7 3.5 L0 7" fill="none" stroke="context-stroke" stroke-width="1.4"/>'
    marker = f'<marker id="tip" markerWidth="8" markerHeight="8" refX="6.5" refY="3.5" orient="auto">{tip}</marker>'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img"><title>{title}</title>'
    return "\n".join([head, f"<style>{STYLE}</style><defs>{marker}</defs>", *parts, "</svg>\n"])


def law() -> str:
    """A layer from left to right; in its middle the rows of a rank and the blocks of in-edges that it folds."""
    parts = []
    for x, first, second in (
        (10, "message", "a row from that row alone"),
        (530, "update", "a row from that row alone"),
    ):
        parts += [box(x - 6, 70, 162, 60), text(x + 75, 97, first), text(x + 75, 117, second, "small")]
    size = 44
    for column in range(4):
        kind = "own" if column == 1 else "halo" if column < 3 else "none"
        parts.append(box(265 + column * size, 78, size - 3, size - 3, kind))
    parts += [
        text(351, 52, "g.aggregate: fold blocks of in-edges"),
        text(329.5, 103, "own", "on"),
        text(285.5, 103, "halo", "on"),
        text(373.5, 103, "halo", "on"),
        text(351, 145, "which blocks, in which order, from where: the strategy", "small"),
        arrow(168, 100, 258, 100),
        arrow(442, 100, 519, 100),
        text(85, 160, "the model", "small"),
        text(605, 160, "the model", "small"),
    ]
    return picture("A layer is local to rows but for one call, which folds blocks of in-edges", 690, 175, *parts)


def exactness() -> str:
    """One device above, ranks below, and what may stand between their gradients."""
    parts = [
        box(10, 20, 170, 50),
        text(95, 42, "one device"),
        text(95, 60, "loss, gradients, logits", "small"),
        box(10, 120, 170, 50),
        text(95, 142, "the strategy, fp64"),
        text(95, 160, "1 to 4 ranks, dropout on", "small"),
        arrow(180, 45, 255, 85),
        arrow(180, 145, 255, 105),
        box(260, 70, 130, 50),
        text(325, 92, "relative error"),
        text(325, 110, "of every gradient", "small"),
    ]
    kinds = (
        ("exact", "at most 1e-9", "own"),
        ("rounded, quantized", "a codec on the wire", "halo"),
        ("stale", "rows of an earlier epoch", "halo"),
        ("sampled", "rows or edges left out", "halo"),
    )
    for i, (name, why, colour) in enumerate(kinds):
        y = 14 + 44 * i
        parts += [arrow(392, 95, 460, y + 16), box(465, y, 12, 32, colour)]
        parts += [text(486, y + 14, name, anchor="start"), text(486, y + 30, why, "small", "start")]
    return picture("A strategy is held against one device; what differs has a name", 690, 195, *parts)


def staleness() -> str:
    """Two ranks over three epochs: rows that are waited for, and rows of the epoch before."""
    parts = []
    for row, (name, kind) in enumerate((("exact: wait for rows", "line"), ("stale: rows of the last epoch", "late"))):
        top = 30 + 120 * row
        parts.append(text(10, top - 10, name, anchor="start"))
        for rank in range(2):
            y = top + rank * 44
            parts.append(text(10, y + 19, f"rank {rank}", "small", "start"))
            for epoch in range(3):
                x = 70 + epoch * (205 if row == 0 else 160)
                parts += [box(x, y, 140, 28, "own"), text(x + 70, y + 19, f"epoch {epoch}", "on")]
                if row == 0 and epoch < 2:
                    parts.append(box(x + 143, y, 58, 28, "none"))
                    parts.append(text(x + 172, y + 18, "wait", "small"))
        for epoch in range(2):
            x = 70 + epoch * (205 if row == 0 else 160)
            parts.append(arrow(x + 120, top + 28, x + (215 if row == 0 else 270), top + 44, kind))
    return picture(
        "Exact training waits for rows; stale training computes with those of the epoch before", 690, 245, *parts
    )


def ledger() -> str:
    """What is sent of the rows of a part, and where it is counted."""
    parts = [text(10, 20, "rows of rank 0 that rank 1 reads", anchor="start")]
    for i in range(6):
        parts.append(box(10, 30 + i * 17, 120, 14, "halo" if i in (1, 2, 4) else "none"))
    parts += [
        arrow(135, 80, 195, 80),
        box(200, 55, 120, 50),
        text(260, 77, "codec"),
        text(260, 95, "fp32, bf16, bits", "small"),
        arrow(322, 80, 372, 80),
        box(378, 62, 130, 36, "own"),
        text(443, 85, "payload", "on"),
        box(508, 62, 60, 36, "halo"),
        text(538, 85, "meta", "on"),
        text(378, 122, "both are counted as they are posted", "small", "start"),
        text(
            10,
            160,
            "3 rows x 64 columns x 4 bytes, forward and backward, each layer: the ledger equals the formula",
            "",
            "start",
        ),
    ]
    return picture(
        "Bytes of an exchange: rows that are read, times width, times what the codec makes of a value", 690, 175, *parts
    )


FIGURES = {"law": law, "exactness": exactness, "staleness": staleness, "bytes": ledger}

if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, draw in FIGURES.items():
        (folder / f"concept_{name}.svg").write_text(draw(), encoding="utf-8")
