"""The suites hold what they claim, and the inputs are as hostile as they claim."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashmla_cupy.testing import cases, inputs
from flashmla_cupy.testing.cases import CONTIGUOUS, Case


@pytest.mark.parametrize("name", sorted(cases.SUITES))
def test_names_are_unique_and_cases_are_consistent(name):
    rows = cases.SUITES[name]()
    assert len({case.name for case in rows}) == len(rows)
    for case in rows:
        assert case.h_q % case.h_kv == 0 and case.lengths and min(case.lengths) >= 0, case.name


def test_full_covers_every_option():
    rows = cases.full()
    assert len(rows) >= 1500
    assert {case.h_q for case in rows} >= {1, 3, 8, 9, 16, 24, 63, 64, 96, 126, 128}
    assert {case.h_kv for case in rows} == {1, 2, 3, 8}
    assert {case.s_q for case in rows} == {1, 2, 3, 4, 5, 8}
    assert {case.page_size for case in rows} == {16, 32, 64, 128, 256, CONTIGUOUS}
    assert {case.d_qk for case in rows} == {512, 576}
    assert {case.dtype for case in rows} == {"bfloat16", "float16"}
    assert {case.q_layout for case in rows} == {case.out_layout for case in rows} == set(cases.Q_LAYOUTS)
    assert {case.cache_layout for case in rows} == set(cases.CACHE_LAYOUTS)
    for length in cases.LENGTHS:
        assert sum(set(case.lengths) == {length} for case in rows) > 20, length
    assert sum(len(set(case.lengths)) > 1 for case in rows) > 300
    assert max(case.batch for case in rows) == 33


def test_full_is_deterministic():
    first = cases.full()
    cases.full.cache_clear()
    assert cases.full() == first


def test_unknown_suite_is_refused():
    with pytest.raises(ValueError, match="suite: got 'huge'"):
        cases.suite("huge")


@pytest.mark.parametrize("case", cases.smoke(), ids=lambda case: case.name)
def test_only_slots_past_the_lengths_are_poisoned(case):
    given = inputs.build(case)
    finite = np.isfinite(given.k_cache.astype(np.float32)).all(axis=(2, 3))
    if case.page_size == CONTIGUOUS:
        expected = np.arange(given.k_cache.shape[1])[None, :] < np.asarray(case.lengths)[:, None]
        assert np.array_equal(finite, expected)
    else:
        assert finite.sum() == sum(case.lengths)
        for request, length in enumerate(case.lengths):
            slots = finite[given.block_table[request, : -(-length // case.page_size)]].reshape(-1)
            assert slots[:length].all() and not slots[length:].any()
    assert np.isfinite(given.q.astype(np.float32)).all()


def test_variants_hold_the_same_data():
    case = Case((70, 0, 13), unchanged=True, seed=5)
    given = inputs.build(case)
    used = given.block_table[0, :2]
    for variant in case.variants():
        other = inputs.build(variant)
        assert np.array_equal(other.block_table[0, :2], used)
        assert np.array_equal(other.q.view(np.uint16), given.q.view(np.uint16))
        assert np.array_equal(other.k_cache[used[0]].view(np.uint16), given.k_cache[used[0]].view(np.uint16))
    assert {variant.poison for variant in case.variants()} == set(cases.POISONS)


@pytest.mark.parametrize("layout", cases.Q_LAYOUTS)
def test_guard_bands_notice_a_write_outside(layout):
    given = inputs.build(Case((3,), s_q=2, h_q=4, out_layout=layout))
    for guarded in (given.out, given.lse):
        assert np.isnan(guarded.array.astype(np.float32)).all()
        guarded.array[...] = 1
        assert guarded.outside_untouched()
        if guarded.buffer.size > guarded.array.size:
            guarded.buffer[...] = 0
            assert not guarded.outside_untouched()


def test_random_data_differ_from_token_to_token_even_when_the_base_repeats():
    given = inputs.build(Case((64 * 120,), h_q=1, poison="zero", spare_pages=0))
    tokens = given.k_cache.reshape(-1, 576)[:, :8].astype(np.float32)
    assert len(np.unique(tokens, axis=0)) == len(tokens)
    assert not np.array_equal(inputs.build(Case((9,), seed=1)).q, inputs.build(replace(Case((9,)), seed=2)).q)
