"""The budget passes what the rounding reference does and fails everything that is clearly wrong."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashmla_cupy.reference._numerics import round_to
from flashmla_cupy.reference.error_budget import lse_error_ratio, out_error_ratio

BF16 = np.dtype(ml_dtypes.bfloat16)


@pytest.fixture
def truth():
    exact = np.random.default_rng(0).standard_normal((3, 2, 4, 64))
    exact[1] *= 1000
    return exact, round_to(exact, BF16)


def test_reference_itself_is_half_the_budget(truth):
    exact, rounded = truth
    ratio = out_error_ratio(rounded, exact, rounded, BF16, per_request=True)
    assert ratio.shape == (3,) and (ratio > 0.4).all() and (ratio <= 0.5).all()
    assert out_error_ratio(exact, exact, rounded, BF16) == 0


def test_one_large_request_hides_nothing_per_request(truth):
    exact, rounded = truth
    wrong = rounded.copy()
    wrong[0, 0, 0, 0] += 0.1
    assert out_error_ratio(wrong, exact, rounded, BF16) <= 1
    assert (out_error_ratio(wrong, exact, rounded, BF16, per_request=True) > 1).tolist() == [True, False, False]


def test_small_errors_everywhere_fail_by_rms(truth):
    exact, rounded = truth
    biased = exact + 1.9 * np.abs(rounded - exact)[0].max()
    assert out_error_ratio(biased[:1], exact[:1], rounded[:1], BF16) > 1


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_non_finite_fails_at_any_place(truth, bad):
    exact, rounded = truth
    wrong = rounded.copy()
    wrong[2, 1, 3, 63] = bad
    ratio = out_error_ratio(wrong, exact, rounded, BF16, per_request=True)
    assert (ratio <= 1).tolist() == [True, True, False]
    lse = np.array([0.0, -np.inf, 3.0])
    wrong_lse = lse.copy()
    wrong_lse[0] = bad
    assert (lse_error_ratio(wrong_lse, lse) <= 1).tolist() == [False, True, True]
    assert not (lse_error_ratio(np.array([0.0]), np.array([bad])) <= 1).any()


def test_exact_reference_leaves_a_tiny_floor():
    exact = np.ones((1, 8))
    assert out_error_ratio(exact + 1e-6, exact, exact, BF16) <= 1
    assert out_error_ratio(exact + 2.0**-8, exact, exact, BF16) > 1
    zeros = np.zeros((1, 8))
    assert out_error_ratio(zeros, zeros, zeros, BF16) == 0
    assert out_error_ratio(zeros + 1e-30, zeros, zeros, BF16) > 1
    assert out_error_ratio(np.empty((0, 4)), np.empty((0, 4)), np.empty((0, 4)), BF16) == 0


def test_lse_tolerance_is_absolute_plus_relative():
    exact = np.array([0.0, 100.0, -np.inf])
    limit = np.array([5e-5, 5e-5 + 2e-3, 0.0])
    assert (lse_error_ratio(exact + 0.99 * limit, exact) <= 1).all()
    assert (lse_error_ratio(exact + 1.01 * limit, exact)[:2] > 1).all()


def test_lse_of_a_request_may_be_off_by_twice_its_reference():
    exact = np.array([[0.0, 1.0, -np.inf], [0.0, 1.0, 2.0]])
    rounded = exact + np.array([[1e-3, 0.0, 0.0], [0.0, np.nan, 0.0]])
    got = exact + 1.9e-3
    assert (lse_error_ratio(got, exact, rounded) <= 1).tolist() == [[True, True, True], [False, False, False]]
    assert not (lse_error_ratio(exact + 2.2e-3, exact, rounded)[0, :2] <= 1).any()


def test_at_a_tie_either_neighbour_is_the_reference_s():
    """1 + 2^-8 lies in the middle between two bfloat16 numbers: what lies at it may be rounded up or down."""
    exact = np.full((1, 8), 1.0)
    exact[0, 0] = 1 + 2.0**-8 - 2.0**-9  # the lower neighbour, 1, is much nearer
    tie = exact.copy()
    tie[0, 0] = 1 + 2.0**-8 - 2.0**-20
    up, down, far = exact.copy(), exact.copy(), exact.copy()
    up[0, 0], down[0, 0], far[0, 0] = 1 + 2.0**-7, 1.0, 1 + 2.0**-6
    assert out_error_ratio(up, exact, tie, BF16) <= 0.5 and out_error_ratio(down, exact, tie, BF16) <= 0.5
    assert out_error_ratio(far, exact, tie, BF16) > 1
    assert out_error_ratio(up, exact, round_to(tie, BF16), BF16) > 1  # rounded before, there is no tie
