"""The choice of widths: thresholds against HiGHS, its linear relaxation and every possible choice; and link costs."""

import itertools

import numpy as np
import pytest
import torch

from gnnpar.codecs.adaptive.links import Profile, fit, nominal
from gnnpar.codecs.adaptive.problem import BitProblem, Pair, merged, split
from gnnpar.codecs.adaptive.solvers import run_highs, solve_program, solve_thresholds
from gnnpar_kernels.wire import row_nbytes

MENU = (2, 4, 8)
NBYTES = np.array([row_nbytes(64, b) for b in MENU], dtype=float)


def instance(seed, *, ranks=2, groups=60, weight=0.5, hidden=0.0, budget=None, exact=False):
    """Lognormal weights; sizes of groups, links and numbers of groups differ between pairs."""
    rng = np.random.default_rng(seed)
    pairs = []
    for sender, receiver in itertools.permutations(range(ranks), 2):
        count = int(rng.integers(groups // 2, groups + 1))
        scale = rng.lognormal(0, 1.5, (count, 1))
        noise = rng.uniform(0.5, 1.5, (count, 3)) if exact else 1.0
        variance = scale * noise / (2.0 ** np.array(MENU) - 1) ** 2
        rows = np.full(count, 10.0)
        rows[-1] = rng.integers(1, 11)
        theta, gamma = rng.uniform(1e-9, 4e-9), rng.uniform(0, 2e-5)
        most = np.inf if budget is None else budget * rows.sum()
        pairs.append(Pair(sender, receiver, variance, rows, NBYTES, theta, gamma, most))
    return BitProblem(tuple(pairs), ranks, weight, hidden)


def lower_bound(problem):
    return run_highs(problem, integral=False)[1]


def uniform_choice(problem, entry):
    return [np.full(len(pair.rows), entry) for pair in problem.pairs]


@pytest.mark.quick(5)
@pytest.mark.parametrize("exact", [False, True], ids=["proxy", "exact"])
@pytest.mark.parametrize(("ranks", "groups"), [(2, 60), (2, 300), (3, 40), (4, 20)])
@pytest.mark.parametrize("seed", range(3))
def test_thresholds_against_the_program_and_its_bound(seed, ranks, groups, exact):
    problem = instance(seed, ranks=ranks, groups=groups, exact=exact)
    found = problem.value(solve_thresholds(problem)).objective
    oracle = problem.value(solve_program(problem)).objective
    bound = lower_bound(problem)
    assert found <= 1.005 * oracle
    assert found >= bound - 1e-9 * abs(bound)
    assert found < min(problem.value(uniform_choice(problem, entry)).objective for entry in range(3))


@pytest.mark.parametrize("hidden", [1e-6, 6e-6])
@pytest.mark.parametrize("seed", range(2))
def test_thresholds_where_compute_hides_rounds(seed, hidden):
    problem = instance(seed, ranks=3, groups=40, hidden=hidden)
    found = problem.value(solve_thresholds(problem)).objective
    assert found <= 1.005 * problem.value(solve_program(problem)).objective
    assert found >= lower_bound(problem) - 1e-9


def test_what_is_hidden_is_free():
    problem = instance(0, hidden=1.0)
    assert all((entries == 2).all() for entries in solve_thresholds(problem)), "a second hides everything: most bits"


@pytest.mark.parametrize("seed", range(3))
def test_a_budget_is_kept_and_used(seed):
    problem = instance(seed, ranks=3, groups=80, budget=float(NBYTES[1]))
    choice = solve_thresholds(problem)
    for pair, entries in zip(problem.pairs, choice, strict=True):
        spent = pair.nbytes[np.arange(len(entries)), entries].sum()
        assert spent <= NBYTES[1] * pair.rows.sum()
        assert spent > 0.97 * NBYTES[1] * pair.rows.sum()
    found = problem.value(choice).objective
    assert found <= 1.005 * problem.value(solve_program(problem)).objective
    assert found < 0.8 * problem.value(uniform_choice(problem, 1)).objective


@pytest.mark.parametrize("budget", [None, float(NBYTES[1])], ids=["time", "budget"])
def test_exchanges_of_an_epoch_together_are_worth_more_than_apart(budget):
    apart = [instance(seed, groups=80, budget=budget) for seed in (0, 1)]
    together = merged(apart)
    choice = solve_thresholds(together)
    found = together.value(choice).objective
    assert found <= 1.005 * together.value(solve_program(together)).objective
    assert found >= lower_bound(together) - 1e-9
    parts = split(choice, apart)
    assert [[len(e) for e in part] for part in parts] == [[len(p.rows) for p in problem.pairs] for problem in apart]
    one_by_one = [solve_thresholds(problem) for problem in apart]
    joined = [np.concatenate(entries) for entries in zip(*one_by_one, strict=True)]
    assert found < together.value(joined).objective


def test_every_choice_of_a_small_problem():
    rng = np.random.default_rng(5)
    variance = rng.lognormal(0, 1, (6, 1)) / (2.0 ** np.array(MENU) - 1) ** 2
    pair = Pair(0, 1, variance, np.ones(6), NBYTES, 1e-9, 0.0)
    problem = BitProblem((pair,), 2, 0.5)
    best = min(problem.value([np.array(c)]).objective for c in itertools.product(range(3), repeat=6))
    assert problem.value(solve_thresholds(problem)).objective == pytest.approx(best, rel=1e-9)
    assert problem.value(solve_program(problem)).objective == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize(("weight", "entry"), [(0.0, 0), (1.0, 2)])
def test_one_goal_alone(weight, entry):
    problem = instance(1, weight=weight)
    slowest = max(problem.pairs, key=lambda p: p.uniform_seconds(entry))
    entries = solve_thresholds(problem)[problem.pairs.index(slowest)]
    assert (entries == entry).all()


def test_bits_that_fill_a_word_are_free():
    nbytes = np.array([row_nbytes(5, bits) for bits in MENU], dtype=float)
    assert nbytes[0] == nbytes[1] < nbytes[2]
    variance = np.ones((9, 1)) / (2.0 ** np.array(MENU) - 1) ** 2
    problem = BitProblem((Pair(0, 1, variance, np.ones(9), nbytes, 1e-9, 0.0, 9 * nbytes[0]),), 2, 0.0)
    assert solve_thresholds(problem)[0].tolist() == [1] * 9


def test_rows_of_no_variance_and_pairs_of_no_rows():
    nothing = Pair(0, 1, np.zeros((4, 3)), np.ones(4), NBYTES, 1e-9, 0.0)
    assert solve_thresholds(BitProblem((nothing,), 2, 0.5))[0].tolist() == [0] * 4
    assert solve_thresholds(BitProblem((), 1, 0.5)) == []


def test_link_costs_are_recovered_and_noise_never_makes_bytes_free():
    sizes = (4096, 65536, 1 << 20)
    theta, gamma = fit(sizes, [3e-9 * n + 2e-4 for n in sizes])
    assert theta == pytest.approx(3e-9, rel=1e-6) and gamma == pytest.approx(2e-4, rel=1e-6)
    assert fit(sizes, [5e-3, 4e-3, 3e-3])[0] == pytest.approx(0.1 * 3e-3 / (1 << 20))
    assert fit(sizes, [1e-9 * n for n in sizes])[1] >= 0


def test_a_profile_can_be_given_back(tmp_path):
    import json

    profile = Profile(2, {(0, 1): (1e-9, 1e-4), (1, 0): (2e-9, 1e-4)}, (1e-6, 2e-6))
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(profile.as_json()))
    assert Profile.read(path, 2) == profile and Profile.read(path, 2).hash == profile.hash
    assert nominal(2).hash != profile.hash
    with pytest.raises(ValueError, match=r"was measured with 2 ranks, this run has 3$"):
        Profile.read(path, 3)
    with pytest.raises(ValueError, match=r"cannot be read .* give the profile.json of a run$"):
        Profile.read(tmp_path / "none.json", 2)


def test_scores_are_sums_of_edge_weights():
    from gnnpar.codecs.adaptive.importance import column_scores
    from gnnpar.folds.block import Block

    dst, src = torch.tensor([0, 0, 2, 2, 2]), torch.tensor([1, 2, 1, 1, 0])
    block = Block.from_edges(dst, src, num_dst=3, num_src=4, compress=True)
    alpha = torch.tensor([0.5, 7.0, 0.25])
    assert column_scores(block, alpha, "sum_of_squares").tolist() == [0.0625, 0.25 + 2 * 0.0625, 0.25, 0.0]
    assert column_scores(block, alpha, "square_of_sum").tolist() == [0.0625, 1.0, 0.25, 0.0]
