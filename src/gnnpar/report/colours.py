"""Colours of strategies and parts of the epoch, for colour-blind readers (Okabe and Ito), dark pages and paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from gnnpar.track.keys import BYTE_PHASES, PHASES

SIX = ("#2b7bba", "#d1602b", "#16916c", "#8064b8", "#c65f98", "#a87a10")  # contrast 3:1 or more on light and dark pages
GREY = "#8b949d"  # for items without a colour, and for times that do not measure speed
_PREFERRED = {"graph_parallel": 0, "hybrid": 1, "sar": 2, "single": 3, "gnnpipe": 4, "adaqp": 5}

TIME: Mapping[str, str] = dict(
    zip(PHASES, ("#5f7fa3", "#8fae5d", "#a98bc4", "#d9663b", "#f0b48c", "#e3c84f", "#6bab8f", "#b9bfc6"), strict=True)
)
_SENT = ("#3f7fb5", "#8db8dc", "#a98bc4", "#d9663b", "#e3c84f", "#6bab8f", "#b9bfc6", "#5f7fa3", "#8fae5d")
BYTES: Mapping[str, str] = dict(zip(BYTE_PHASES, _SENT, strict=True))
MEMORY = {
    "features": "#5f7fa3",
    "activations": "#d9663b",
    "halo": "#e3c84f",
    "history": "#a98bc4",
    "structure": "#6bab8f",
    "parameters": "#8db8dc",
    "optimizer": "#b9bfc6",
    "host": "#e6d9c2",
}
SHADES = ("#1f5d91", "#4f92c9", "#2f7f9e", "#7fb6d9", "#3f6fb5", "#a3c7e3")  # layers in order
OTHER = "#b9bfc6"  # small parts together
DASHES = ("none", "7 4", "2 3", "7 3 2 3", "12 4", "12 3 2 3")  # of SVG


def of_strategies(chosen: Sequence[str], names: Iterable[str]) -> Mapping[str, str]:
    """Return a colour for each of at most six strategies, grey for the others. Strategies in _PREFERRED have the same
    colour on every page; the rest take free colours in order."""
    tints = {name: SIX[_PREFERRED[name]] for name in chosen if name in _PREFERRED}
    free = [tint for tint in SIX if tint not in tints.values()]
    tints |= dict(zip([name for name in chosen if name not in tints], free, strict=False))
    return {name: tints[name] for name in chosen} | {name: GREY for name in names if name not in tints}
