"""One colour a strategy and one a part of the epoch, kept in every picture; told apart by colour-blind readers
(after Okabe and Ito), light enough for a dark page and dark enough for paper."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gnnpar.track.keys import BYTE_PHASES, PHASES

_KNOWN = {
    "single": "#7a8794",
    "graph_parallel": "#2b7bba",
    "adaqp": "#e09f1f",
    "sar": "#1a9e77",
    "gnnpipe": "#c76fa1",
    "hybrid": "#d1602b",
    "tag": "#58b0dd",
    "minibatch": "#8c6d5a",
    "bns": "#9a8f1e",
    "cofree": "#4aa3a2",
    "pipegcn": "#8064b8",
    "feature": "#5f8f4e",
    "digest": "#b8536b",
    "cagnet": "#4aa3a2",
    "sancus": "#9b7653",
}
_OTHERS = ("#a08a1c", "#8064b8", "#5f8f4e", "#b8536b", "#4aa3a2", "#9b7653")
GREY = "#a5adb5"  # of times that are no statement on speed

TIME: Mapping[str, str] = dict(
    zip(PHASES, ("#5f7fa3", "#8fae5d", "#a98bc4", "#d9663b", "#f0b48c", "#e3c84f", "#6bab8f", "#b9bfc6"), strict=True)
)
_SENT = ("#3f7fb5", "#8db8dc", "#a98bc4", "#d9663b", "#e3c84f", "#6bab8f", "#b9bfc6")
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
DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "diamond", "square", "triangle-up", "cross", "star")


def of_strategies(names: Iterable[str]) -> Mapping[str, str]:
    """Known strategies keep their colour from page to page; others take the rest in alphabetical order."""
    unknown = sorted(set(names) - set(_KNOWN))
    return _KNOWN | {name: _OTHERS[i % len(_OTHERS)] for i, name in enumerate(unknown)}
