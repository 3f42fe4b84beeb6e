"""Intervals against the protocol's own figures and closed forms."""

import math

import numpy as np
import pytest

from gnnpar.report.statistics import geometric_mean, mean, non_inferiority


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
    found = mean([1.0, 2.0, 3.0])
    assert found.n == 3
    assert (found.value, found.high) == (2.0, pytest.approx(2 + 4.302653 / math.sqrt(3)))
    assert math.isnan(mean([1.0]).low)


def test_ratios_average_in_logarithms_and_intervals_cover() -> None:
    assert geometric_mean([0.5, 2.0]).value == pytest.approx(1)
    rng = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        found = geometric_mean(np.exp(0.3 + 0.1 * rng.standard_normal(20)).tolist(), draws=500)
        covered += found.low <= math.exp(0.3) <= found.high
    assert 175 <= covered <= 200  # 95 % nominal; the percentile bootstrap of 20 blocks covers a little less


def test_no_numbers_is_an_error() -> None:
    for values in ([], [1.0, math.nan]):
        with pytest.raises(ValueError, match="at least one number"):
            mean(values)
    with pytest.raises(ValueError, match="margin is 0"):
        non_inferiority([0.0, 0.1], 0)
