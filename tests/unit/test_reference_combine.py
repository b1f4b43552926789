"""merge: the softmax over a union of keys from the softmax over its parts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from flashmla_cupy.reference import combine


def attend(scores: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, float]:
    if not len(scores):
        return np.full(values.shape[1], np.nan), -math.inf  # what an empty part holds must not matter
    weights = np.exp(scores - scores.max())
    return weights @ values / weights.sum(), scores.max() + math.log(weights.sum())


@pytest.mark.parametrize("cuts", [(), (0,), (3, 3, 10), (1, 2, 39), tuple(range(1, 40))])
def test_parts_merge_to_the_whole(cuts):
    rng = np.random.default_rng(0)
    scores, values = 20 * rng.standard_normal(40), rng.standard_normal((40, 6))
    parts = [attend(s, v) for s, v in zip(np.split(scores, cuts), np.split(values, cuts), strict=True)]
    out, lse = combine.merge(np.stack([o for o, _ in parts]), np.array([s for _, s in parts]))
    whole, whole_lse = attend(scores, values)
    np.testing.assert_allclose(out, whole, rtol=1e-12)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-14)


def test_nothing_to_merge_and_huge_scores():
    lses = np.array([[-np.inf, 1e30, -1e30, -np.inf], [-np.inf, -np.inf, -1e30, 3.0]])
    outs = np.stack([np.full((4, 2), 1.0), np.full((4, 2), 3.0)])
    outs[0, 0] = outs[1, 1] = np.inf
    out, lse = combine.merge(outs, lses)
    np.testing.assert_array_equal(out[:, 0], [0, 1, 2, 3])
    np.testing.assert_allclose(lse, [-np.inf, 1e30, -1e30, 3.0])


def test_sink_of_a_row_without_keys():
    """It stays 0, as the kernels leave it, whatever the sink."""
    sink = np.array([np.nan, -np.inf, np.inf, 3], np.float32)
    out, lse = combine.merge(np.full((2, 1, 4, 8), np.nan), np.full((2, 1, 4), -np.inf), attn_sink=sink)
    assert np.array_equal(out, np.zeros((1, 4, 8))) and np.array_equal(lse, np.full((1, 4), -np.inf))
    out, _ = combine.merge(np.ones((1, 1, 4, 8)), np.zeros((1, 1, 4)), attn_sink=sink)
    assert np.isnan(out[0, 0]).all() and np.isfinite(out[0, 1:]).all()


def test_sink_enters_the_denominator_once():
    rng = np.random.default_rng(1)
    outs, lses = rng.standard_normal((3, 5, 4, 8)).astype(np.float32), rng.standard_normal((3, 5, 4)).astype(np.float32)
    lses[:, 2] = -np.inf
    sink = np.array([-np.inf, -5.0, 20.0, np.inf], np.float32)
    plain, lse = combine.merge(outs, lses)
    out, lse_with_sink = combine.merge(outs, lses, attn_sink=sink)
    np.testing.assert_array_equal(lse_with_sink, lse)
    np.testing.assert_array_equal(out[:, 0], plain[:, 0])
    for head in (1, 2):
        share = np.exp(lse[:, head]) / (np.exp(lse[:, head]) + np.exp(sink[head].astype(np.float64)))
        np.testing.assert_allclose(out[:, head], plain[:, head] * share[:, None], rtol=1e-12)
    assert not out[:, 3].any() and not out[2].any()
