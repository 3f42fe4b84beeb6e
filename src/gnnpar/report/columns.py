"""Columns of a study by name, and arithmetic over them that pairs runs by seed and block.

A column is text with {EXPRESSION:FORMAT} in it. An expression contains names of MEASURES, keys of result.json with dots
between them, numbers, + - * /, and FUNCTIONS. A call names another job: `epoch_s(vanilla)` is epoch_s of the method
vanilla in the same cell. FORMAT is Python's, followed by 'i' to show the interval, or 'x' to show it unless all samples
agree; '±' and '+±' choose their own decimals.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
import statistics as plain
import string
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Literal, NamedTuple

from gnnpar.config.study import Study
from gnnpar.files import Json, JsonObject, read_json
from gnnpar.report.formatting import NOTHING, interval
from gnnpar.report.runs import by, no_speed, value_at
from gnnpar.report.statistics import FEWEST_BLOCKS, FEWEST_SEEDS, Estimate, family, geometric_mean, mean
from gnnpar.settings import ConfigError, closest, show
from gnnpar.training.result.result import epoch_time, schema_path

Pair = tuple[int, int]  # (seed, block)
Runs = Mapping[tuple[str, ...], Mapping[Pair, JsonObject]]  # job's position on the axes -> its results
How = Literal["mean", "geometric", "max"]
_MIB = 2**20


class Measure(NamedTuple):
    """A column's source. of: returns the number of a run, or None. timed: compare only runs of one session."""

    of: Callable[[JsonObject], float | None]
    form: str
    how: How = "mean"
    timed: bool = False


def _share(result: JsonObject) -> float | None:
    """Return the percentage of an epoch spent in communication that computation does not hide."""
    parts = [result["breakdown_seconds"][part] for part in ("exposed_wire", "exposed_skew", "reduce")]
    epoch = result["epoch_seconds"]["mean"]
    return None if not epoch or None in parts else 100 * sum(parts) / epoch


def _peak(result: JsonObject) -> float | None:
    """Return MiB of the rank with the largest peak."""
    peak = result["memory_bytes"]["peak"]
    return max(peak) / _MIB if peak and None not in peak else None


def _points(result: JsonObject) -> float | None:
    """Return the test metric at the best validation, in percent."""
    metric = result["metric"]
    test = metric["test"] if metric["test_at_best_val"] is None else metric["test_at_best_val"]
    return None if test is None else 100 * test


MEASURES: dict[str, Measure] = {
    "epoch_s": Measure(lambda result: result["epoch_seconds"]["mean"], ".3f", "geometric", timed=True),
    "epoch": Measure(epoch_time, ".3f", "geometric", timed=True),  # as in `gnnpar compare`
    "share": Measure(_share, ".0f", timed=True),
    "peak_mib": Measure(_peak, ".0f", "max"),
    "sent_mib": Measure(lambda result: result["bytes_per_epoch"]["total"] / _MIB, ".1f"),
    "points": Measure(_points, "±"),
}
_LIVE = " + ".join(f"memory_bytes.live.{part}" for part in ("parameters", "optimizer", "features"))
SHORT = {  # name -> expression, format
    "epoch_ms": ("1000 * epoch_s", ".0f"),
    "own_mib": (f"peak_mib - ({_LIVE}) / {_MIB}", ".1f"),  # without the memory that every strategy holds
    "cosine": ("fidelity.cosine.mean", ".4f"),
}
FUNCTIONS = {"times": ".2fx", "over": "+±", "verdict": "", "runs": ""}
_OF_SAMPLES = ("abs", "average", "first", "geometric")
FUNCTIONS |= dict.fromkeys(_OF_SAMPLES, ".1f")
_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}


class Samples(NamedTuple):
    """(seed, block) -> number and session, with the kind of average. timed: compare only runs of one session."""

    of: Mapping[Pair, tuple[float, str]]
    how: How = "mean"
    timed: bool = False

    def apply(self, of: Callable[[float], float]) -> Samples:
        return self._replace(of={pair: (of(value), session) for pair, (value, session) in self.of.items()})

    def paired(self, other: Samples, of: Callable[[float, float], float]) -> Samples:
        """Pair by seed and block, times inside a session. Quotients have a geometric mean."""
        pairs = [pair for pair in self.of if pair in other.of and (of is not operator.truediv or other.of[pair][0])]
        if self.timed and other.timed:
            pairs = [pair for pair in pairs if self.of[pair][1] == other.of[pair][1]]
        numbers = {pair: (of(self.of[pair][0], other.of[pair][0]), self.of[pair][1]) for pair in pairs}
        return Samples(numbers, "geometric" if of is operator.truediv else "mean", self.timed or other.timed)

    def averages_by(self, place: int, average: Callable[[Sequence[float]], float] = plain.fmean) -> list[float]:
        """Return the averages by seed (0) or block (1)."""
        same = by(sorted(self.of.items()), lambda sample: sample[0][place])
        return [average([value for _, (value, _) in samples]) for samples in same.values()]

    def estimate(self) -> Estimate | None:
        """Return the geometric or the arithmetic mean, or the largest number.

        Samples of times and quotients are blocks, or seeds if there is one block, since the runs of a seed follow each
        other in random order. Other samples are seeds, averaged over blocks.
        """
        if not self.of or (self.how == "geometric" and min(value for value, _ in self.of.values()) <= 0):
            return None
        if self.how == "max":
            most = max(value for value, _ in self.of.values())
            return Estimate(most, math.nan, math.nan, len(self.of))
        by = int(len(self.averages_by(1)) > 1)
        if self.how == "geometric":
            return geometric_mean(self.averages_by(by, plain.geometric_mean))
        return mean(self.averages_by(by), fewest=FEWEST_BLOCKS) if self.timed else mean(self.averages_by(0))

    def refuse_few(self, study: Study) -> None:
        """Raise ConfigError if a study of methods has fewer blocks or seeds than an interval needs."""
        unit, there, fewest = "seeds", len(study.seed_list), FEWEST_SEEDS
        if self.timed or self.how == "geometric":
            unit, there, fewest = "blocks", study.blocks if study.blocks > 1 else there, FEWEST_BLOCKS
        if there < fewest and study.methods:
            raise ConfigError(f"an interval needs run.{unit}={fewest}, not {there}")


Value = Samples | float | str | None


@dataclass(frozen=True)
class Cell:
    """The job of a column. at: axis -> name. rows: `at` of every row of the table."""

    study: Study
    runs: Runs
    at: Mapping[str, str]
    rows: Sequence[Mapping[str, str]] = ()

    def value(self, expression: str) -> Value:
        try:
            return self.at.get(expression) or self._value(ast.parse(expression, mode="eval").body)
        except SyntaxError as error:
            raise ConfigError(f"{{{expression}}} is no expression: {error.msg}") from None
        except ZeroDivisionError:
            return None

    def _value(self, node: ast.expr) -> Value:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.BinOp(left, op, right) if type(op) in _OPERATORS:
                return _combined(self._value(left), self._value(right), _OPERATORS[type(op)])
            case ast.Call(func=ast.Name(id=name), args=args) if name in FUNCTIONS:
                return self._function(name, args)
            case ast.Call(func=measure, args=args):
                return self._to(args)._value(measure)
            case ast.Name(id=name) if name in SHORT:
                return self.value(SHORT[name][0])
            case ast.Name() | ast.Attribute():
                return self._measure(ast.unparse(node))
        raise ConfigError(f"{ast.unparse(node)} is no name of a column, number or quotient of them")

    def _function(self, name: str, args: list[ast.expr]) -> Value:
        if name == "runs":
            return str(len(self._to(args).results()))
        if name in _OF_SAMPLES and len(args) == 1:
            found = self._value(args[0])
            if not isinstance(found, Samples):
                return found
            if name in ("abs", "geometric"):
                return found.apply(abs) if name == "abs" else found._replace(how="geometric")
            numbers = [number for _, (number, _) in sorted(found.of.items())]
            return (plain.fmean(numbers) if name == "average" else numbers[0]) if numbers else None
        judged = name == "verdict"
        if len(args) < 1 + judged:
            raise ConfigError(f"{name} needs a base{' and a margin' * judged}, as {name}(NAME{', 0.3' * judged})")
        base = self._to(args[: len(args) - judged])
        if name == "times":
            return base._samples("epoch_s").paired(self._samples("epoch_s"), operator.truediv)
        if name == "over":
            return None if base.at == self.at else self._samples("points").paired(base._samples("points"), operator.sub)
        others = {i: replace(self, at=at)._function("over", args[:-1]) for i, at in enumerate(self.rows)}
        found = {i: over.averages_by(0) for i, over in others.items() if isinstance(over, Samples) and over.of}
        verdicts = dict(zip(found, family([*found.values()], float(ast.literal_eval(args[-1]))), strict=True))
        return next((verdicts[i] for i in verdicts if self.rows[i] == self.at), NOTHING)  # corrected for all rows

    def _to(self, args: Sequence[ast.expr]) -> Cell:
        """Return the cell of another job; each argument is a name on one axis."""
        at = dict(self.at)
        for arg in args:
            name = str(arg.value) if isinstance(arg, ast.Constant) else ast.unparse(arg)
            axes = [axis for axis, names in self.study.axes.items() if name in names]
            if len(axes) != 1:
                hint = closest(name, [each for names in self.study.axes.values() for each in names])
                raise ConfigError(f"{show(name)} is {'a name of several axes' if axes else f'no cell or method{hint}'}")
            at[axes[0]] = name
        changed = {axis: name for axis, name in at.items() if self.at.get(axis) != name}
        return replace(self, at=at, rows=[{**row, **changed} for row in self.rows])

    def place(self) -> tuple[str, ...]:
        if missing := [axis for axis in self.study.axes if axis not in self.at]:
            raise ConfigError(f"it does not say which {missing[0]}; put one in brackets, as epoch_ms(NAME)")
        return tuple(self.at[axis] for axis in self.study.axes)

    def results(self) -> dict[Pair, JsonObject]:
        """Return the runs that completed."""
        every = self.runs.get(self.place(), {})
        return {pair: result for pair, result in every.items() if result.get("status", "completed") == "completed"}

    def failure(self) -> str:
        """Return the reason if all runs of the job failed, else ''."""
        if self.at.keys() < self.study.axes.keys() or self.results():
            return ""
        return next((" ".join(str(result["error"]).split()) for result in self.runs.get(self.place(), {}).values()), "")

    def _samples(self, name: str) -> Samples:
        measure, found = MEASURES[name], {}
        for pair, result in self.results().items():
            number = measure.of(result)
            if number is not None and not (measure.timed and timeless(self.study, result)):
                found[pair] = number, str(result.get("session"))
        return Samples(found, measure.how, measure.timed)

    def _measure(self, name: str) -> Value:
        """Return a measure of the job's runs; for a key of result.json its numbers, or the text of the first run."""
        if name in MEASURES:
            return self._samples(name)
        if name.partition(".")[0] not in _keys():
            known = [*MEASURES, *SHORT, *FUNCTIONS]
            raise ConfigError(f"{name} is no column{closest(name, known)}; there are {', '.join(known)}")
        found = {pair: value_at(result, name.split(".")) for pair, result in self.results().items()}
        if text := next((each for each in found.values() if isinstance(each, str)), ""):
            return text
        return Samples({pair: (float(each), "") for pair, each in found.items() if isinstance(each, int | float)})


def timeless(study: Study, result: JsonObject) -> bool:
    """Return True if ranks share cores and the study does not request their times."""
    return not study.shared_cores and no_speed(result)


def _combined(left: Value, right: Value, of: Callable[[float, float], float]) -> Value:
    if isinstance(left, Samples) and isinstance(right, Samples):
        return left.paired(right, of)
    if isinstance(left, Samples) and isinstance(right, float):
        return left.apply(lambda number: of(number, right))
    if isinstance(left, float) and isinstance(right, Samples):
        return right.apply(lambda number: of(left, number))
    return of(left, right) if isinstance(left, float) and isinstance(right, float) else None


@cache
def _keys() -> JsonObject:
    """Return the keys of result.json with their schemas."""
    return read_json(schema_path())["properties"]


def is_name(study: Study, text: str) -> bool:
    """Return True for a column of axis names only."""
    return all(each in study.axes for _, each, _, _ in string.Formatter().parse(text) if each is not None)


def values(cell: Cell, text: str) -> Iterator[tuple[str, Value, str]]:
    """Return (text before it, value, format) of each expression of a column; '' is the value after the last."""
    for before, expression, form, _ in string.Formatter().parse(text):
        value = "" if expression is None else cell.value(expression)
        try:
            format(1.0, (form or "").removesuffix("+±").rstrip("ix±"))
            if isinstance(value, Samples) and form and form[-1] in "ix±":
                value.refuse_few(cell.study)
        except ValueError as error:
            raise ConfigError(f"{{{expression}}}: {error}") from None
        yield before, value, form or ""


def filled(cell: Cell, text: str) -> str:
    """Return a column's text with its expressions' values; '-' if one is unknown."""
    shown = [(before, _text(value, form)) for before, value, form in values(cell, text)]
    return NOTHING if any(each == NOTHING for _, each in shown) else "".join(itertools.chain(*shown))


def exact(cell: Cell, text: str) -> Json:
    """Return value, low, high and n of a column that is one expression, null for unknown; else the text."""
    found = [value for _, value, _ in values(cell, text) if value != ""]
    if len(found) != 1 or not isinstance(found[0], Samples):
        return filled(cell, text)
    known = asdict(estimate) if (estimate := found[0].estimate()) else {}
    return {key: value if math.isfinite(value) else None for key, value in known.items()} or None


def form_of(column: str, study: Study) -> str:
    """Return the format of a column that is a single name or expression."""
    name = column.partition("(")[0]
    if column == "points" and len(study.seed_list) < FEWEST_SEEDS:
        return ".1f"
    if name in MEASURES or name in SHORT:
        return MEASURES[name].form if name in MEASURES else SHORT[name][1]
    return FUNCTIONS.get(name, "+.2fx" if " - " in column else ".3fx" if " / " in column else ".2f")


def _text(value: Value, form: str) -> str:
    if isinstance(value, str):
        return value
    found = value.estimate() if isinstance(value, Samples) else value
    if found is None:
        return NOTHING
    if not isinstance(found, Estimate):
        return format(found, form)
    if form.endswith("±"):
        return interval(found, signed=form == "+±")
    number, low, high = (format(each, form.rstrip("ix")) for each in (found.value, found.low, found.high))
    if form.endswith("x") and not found.low < found.high:
        return "1" if found.value == 1 and "+" not in form else number
    return number if form[-1:] not in ("i", "x") or math.isnan(found.low) else f"{number} ({low} to {high})"
