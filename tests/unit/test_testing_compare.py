"""The comparison rule: NaN fails, infinities come first, no request hides behind its neighbours."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from flashmla_cupy.testing import plain
from flashmla_cupy.testing.compare import compare

SHAPE = (2, 1, 3, 8)


@pytest.fixture
def truth():
    rng = np.random.default_rng(0)
    out, lse = rng.standard_normal(SHAPE), rng.standard_normal((2, 3, 1))
    out[1] *= 0.01
    rounded = out.astype(ml_dtypes.bfloat16).astype(np.float64)
    return (out, lse), (rounded, lse), rounded.astype(ml_dtypes.bfloat16), lse.astype(np.float32)


def test_a_rounded_result_passes(truth):
    exact, rounded, out, lse = truth
    errors = compare(out, lse, exact, rounded)
    assert errors.message is None and 0 < errors.out <= 0.5 + 1e-9 and errors.lse < 0.01


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_not_finite_fails(truth, value):
    exact, rounded, out, lse = truth
    out[1, 0, 2, 3] = value
    assert "(1, 0, 2, 3)" in compare(out, lse, exact, rounded).message


def test_nan_in_lse_and_a_finite_value_for_an_empty_row_fail(truth):
    exact, rounded, out, lse = truth
    lse[0, 1, 0] = np.nan
    assert "lse" in compare(out, lse, exact, rounded).message
    lse[0, 1, 0] = -1e30
    exact[1][0, 1, 0] = -np.inf
    assert compare(out, lse, exact, rounded).message.endswith("at (0, 1, 0): got -1e+30, expected -inf")
    lse[0, 1, 0] = -np.inf
    assert compare(out, lse, exact, rounded).message is None


def test_a_message_names_an_error_and_no_nan_that_is_right(truth):
    exact, rounded, out, lse = truth
    out[0, 0, 0, 0] = exact[0][0, 0, 0, 0] = rounded[0][0, 0, 0, 0] = np.nan
    assert compare(out, lse, exact, rounded).message is None
    out[0, 0, 2, 3] += 1
    message = compare(out, lse, exact, rounded).message
    assert "x the allowed error" in message and "at (0, 0, 2, 3)" in message


def test_small_request_is_held_to_its_own_error(truth):
    exact, rounded, out, lse = truth
    out[1] = (exact[0][1] + 0.002).astype(out.dtype)  # below the error allowed in request 0
    message = compare(out, lse, exact, rounded).message
    assert message.startswith("out: ") and "at (1, " in message


def test_lse_tolerance(truth):
    exact, rounded, out, lse = truth
    lse[0, 0, 0] += 1e-4
    assert compare(out, lse, exact, rounded).message.startswith("lse: ")


def test_exact_values_are_demanded_where_rounding_has_no_error(truth):
    exact, _, out, lse = truth
    exact = (out.astype(np.float64), exact[1])
    assert compare(out, lse, exact, exact).message is None
    out[0, 0, 0, 0] = float(out[0, 0, 0, 0]) * 1.02
    assert compare(out, lse, exact, exact).message is not None


def test_wrong_shape_fails(truth):
    exact, rounded, out, lse = truth
    assert "shape" in compare(out[:1], lse, exact, rounded).message


def test_plain_attention_by_hand():
    q = np.array([1.0, 0.0]).reshape(1, 1, 1, 2)
    cache = np.array([[[[np.log(3.0), 5.0]], [[0.0, 7.0]]]])  # scores log 3 and 0: weights 3/4 and 1/4
    out, lse = plain.attend(q, cache, np.zeros((1, 1), np.int32), (2,), 2, 1.0, False)
    np.testing.assert_allclose(out[0, 0, 0], [0.75 * np.log(3.0), 0.75 * 5 + 0.25 * 7])
    np.testing.assert_allclose(lse[0, 0, 0], np.log(4.0))
    out, lse = plain.attend(q, cache, None, (0,), 2, 1.0, False)
    assert not out.any() and np.isneginf(lse).all()
