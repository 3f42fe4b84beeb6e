"""Draw the badges of the README from the files that they lead to: `python docs/images/make_badges.py [FOLDER]`."""

from __future__ import annotations

import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
BADGES = {  # file name -> left, right, colour of the right
    "version": ("version", PROJECT["version"], "#2b6cb0"),
    "python": ("python", PROJECT["requires-python"].replace(">=", "&#8805; "), "#2b6cb0"),
    "license": ("license", PROJECT["license"], "#1a7f5a"),
    "cite": ("cite", "CITATION.cff", "#5f4b8b"),
}


def badge(left: str, right: str, colour: str) -> str:
    """Two words side by side. Widths: 6.6 pixels a character of 11."""
    a, b = (round(6.6 * len(word.replace("&#8805;", "x"))) + 14 for word in (left, right))
    label = right.replace("&#8805;", "at least")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{a + b}" height="20" role="img" aria-label="{left}: {label}">'
        f'<rect width="{a + b}" height="20" rx="3" fill="{colour}"/><path d="M3 0h{a - 3}v20h-{a - 3}a3 3 0 0 1-3-3v-14'
        f'a3 3 0 0 1 3-3z" fill="#444c56"/><g fill="#fff" font-family="system-ui,sans-serif" font-size="11" '
        f'text-anchor="middle"><text x="{a / 2:g}" y="14">{left}</text><text x="{a + b / 2:g}" y="14">{right}</text>'
        "</g></svg>\n"
    )


if __name__ == "__main__":
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parent
    for name, words in BADGES.items():
        (folder / f"badge_{name}.svg").write_text(badge(*words), encoding="utf-8")
