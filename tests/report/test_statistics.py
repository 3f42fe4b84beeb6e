"""Intervals against the protocol's own figures and closed forms."""

import math

import numpy as np
import pytest
from scipy.special import stdtrit

from gnnpar.report.statistics import FEWEST_BLOCKS, FEWEST_SEEDS, family, geometric_mean, mean, non_inferiority


@pytest.mark.parametrize(
    ("n", "deviation", "half"), [(5, 0.3, 0.29), (10, 0.3, 0.17), (10, 0.5, 0.29), (20, 0.5, 0.19)]
)
def test_one_sided_half_widths_of_the_protocol(n: int, deviation: float, half: float) -> None:
    x = np.linspace(-1, 1, n)
    x *= deviation / x.std(ddof=1)
    assert non_inferiority(x, half + 0.006) == "not inferior"
    assert non_inferiority(x, half - 0.006) == "inconclusive"
    assert non_inferiority(x - 1, 1 - half - 0.006) == "inferior"


def test_mean_with_students_interval() -> None:
    found = mean([1.0, 2.0, 3.0], fewest=3)
    assert found.n == 3
    assert (found.value, found.high) == (2.0, pytest.approx(2 + 4.302653 / math.sqrt(3)))
    assert math.isnan(mean([1.0, 2.0, 3.0]).low)


@pytest.mark.parametrize("n", [FEWEST_BLOCKS, 5, 10])
def test_intervals_of_ratios_cover_what_they_say(n: int) -> None:
    """Of 1,000 studies of n blocks each, 95 % hold the truth: at 3 blocks, too."""
    logs = 0.3 + 0.1 * np.random.default_rng(n).standard_normal((1000, n))
    found = [geometric_mean(np.exp(each).tolist()) for each in logs]
    covered = sum(each.low <= math.exp(0.3) <= each.high for each in found)
    assert 930 <= covered <= 970  # three deviations of a count of 950 are 21
    assert found[0].value == pytest.approx(math.exp(logs[0].mean()))


@pytest.mark.parametrize("n", [FEWEST_SEEDS, 10])
def test_intervals_of_means_cover_what_they_say(n: int) -> None:
    samples = np.random.default_rng(n).standard_normal((1000, n))
    found = [mean(each.tolist()) for each in samples]
    assert 930 <= sum(each.low <= 0 <= each.high for each in found) <= 970


def test_intervals_need_their_runs() -> None:
    assert math.isnan(geometric_mean([2.0, 2.1]).low) and geometric_mean([2.0, 2.1, 2.2]).low > 1.8
    assert math.isnan(mean([1.0] * 4).low) and mean([1.0] * 5).low == 1.0


@pytest.mark.parametrize(("n", "wrong"), [(2, 0), (4, 0), (5, 50), (10, 50)])
def test_false_verdicts_stay_below_their_level(n: int, wrong: int) -> None:
    """A method that is worse by exactly the margin passes in 5 % of studies, and in none below five seeds."""
    samples = -0.3 + 0.3 * np.random.default_rng(n).standard_normal((1000, n))
    verdicts = [non_inferiority(each.tolist(), 0.3) for each in samples]
    assert abs(verdicts.count("not inferior") - wrong) <= (21 if wrong else 0)
    assert abs(verdicts.count("inferior") - wrong) <= (21 if wrong else 0)
    assert wrong or set(verdicts) == {"not enough runs"}


def test_a_family_is_stepped_down_as_holm_says() -> None:
    """Three studies whose one-sided p are 0.01, 0.02 and 0.04: each passes alone and in its turn (0.05 / 3, / 2, / 1);
    with 0.03 in the place of 0.02 the second fails, and the third with it."""

    def study(p: float, n: int = 10) -> list[float]:
        x = np.linspace(-1, 1, n)
        x /= x.std(ddof=1)
        return (x - stdtrit(n - 1, p) / math.sqrt(n) - 1).tolist()

    assert family([study(0.02), study(0.04), study(0.01)], 1) == ["not inferior"] * 3
    assert family([study(0.03), study(0.04), study(0.01)], 1) == ["inconclusive", "inconclusive", "not inferior"]
    assert [non_inferiority(study(p), 1) for p in (0.01, 0.03, 0.04, 0.06)] == ["not inferior"] * 3 + ["inconclusive"]
    assert family([study(0.97), study(0.96), study(0.99)], 1) == ["inconclusive", "inconclusive", "inferior"]
    mixed = family([study(0.03), [5.0] * 3, [5.0] * 5, [-5.0] * 5], 1)
    assert mixed == ["inconclusive", "not enough runs", "not inferior", "inferior"]


def test_false_verdicts_of_a_family_stay_below_its_level() -> None:
    """Ten methods worse by exactly the margin: in 5 % of families one passes, where uncorrected ones pass in 40 %."""
    samples = -0.3 + 0.3 * np.random.default_rng(0).standard_normal((1000, 10, 10))
    wrong = sum("not inferior" in family(each.tolist(), 0.3) for each in samples)
    assert 29 <= wrong <= 71  # three deviations of a count of 50 are 21


def test_ratios_average_in_logarithms() -> None:
    assert geometric_mean([0.5, 2.0]).value == pytest.approx(1)


def test_no_numbers_is_an_error() -> None:
    for values in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="at least one number"):
            mean(values)
    with pytest.raises(ValueError, match="margin is 0"):
        non_inferiority([0.0, 0.1], 0)
