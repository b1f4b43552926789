"""Sparse prefill on the GPU: the smoke and corner suites, and checks of more than one call."""

from __future__ import annotations

import pytest

from flashmla_cupy.testing import machine, prefill_cases, prefill_checks, prefill_scenarios

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> machine.Machine:
    return machine.detect()


@pytest.mark.parametrize("case", prefill_cases.smoke(), ids=lambda case: case.name)
def test_smoke(case, gpu):
    errors = prefill_checks.prefill(case, gpu)
    assert errors.message is None, f"{case.name}: {errors.message}"


@pytest.mark.parametrize("case", prefill_cases.corner(), ids=lambda case: case.name)
def test_corner(case, gpu):
    """Invalid indices over poisoned rows, widths, requests, strides, sinks, head counts, views."""
    errors = prefill_checks.prefill(case, gpu)
    assert errors.message is None, f"{case.name}: {errors.message}"


@pytest.mark.parametrize("s_q", [65535, 65536, 65537])
def test_many_query_tokens(s_q, gpu):
    assert prefill_scenarios.many_tokens(gpu, s_q).message is None


def test_rows_far_into_a_large_array(gpu):
    if gpu.xp.cuda.runtime.memGetInfo()[0] < 11e9:
        pytest.skip("needs 11 GB of free GPU memory")
    assert prefill_scenarios.far_rows(gpu).message is None


@pytest.mark.parametrize(
    "scenario",
    [
        prefill_scenarios.merge_halves,
        prefill_scenarios.arguments,
        prefill_scenarios.odd_arguments,
        prefill_scenarios.odd_offsets,
        prefill_scenarios.nothing_to_attend,
        prefill_scenarios.graph_contents,
        prefill_scenarios.repetition,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_more_than_one_call(scenario, gpu):
    assert scenario(gpu).message is None
