"""Sparse FP8 decode on the GPU: the smoke and corner suites, and checks of more than one call."""

from __future__ import annotations

import pytest

from flashmla_cupy.testing import machine, sparse_cases, sparse_checks, sparse_scenarios

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> machine.Machine:
    return machine.detect()


@pytest.mark.parametrize("case", sparse_cases.smoke(), ids=lambda case: case.name)
def test_smoke(case, gpu):
    errors = sparse_checks.sparse(case, gpu)
    assert errors.message is None, f"{case.name}: {errors.message}"


@pytest.mark.parametrize("case", sparse_cases.corner(), ids=lambda case: case.name)
def test_corner(case, gpu):
    """Invalid indices over poisoned slots, scales, widths, page strides, sinks, head counts, views."""
    errors = sparse_checks.sparse(case, gpu)
    assert errors.message is None, f"{case.name}: {errors.message}"


def test_slots_far_into_a_large_pool(gpu):
    if gpu.xp.cuda.runtime.memGetInfo()[0] < 7e9:
        pytest.skip("needs 7 GB of free GPU memory")
    assert sparse_scenarios.far_slots(gpu).message is None


@pytest.mark.parametrize("pdl", [True, False], ids=["pdl", "no_pdl"])
def test_repetition_is_bit_identical(gpu, pdl):
    assert sparse_scenarios.repetition(gpu, pdl).message is None


@pytest.mark.parametrize(
    "scenario",
    [
        sparse_scenarios.merge_halves,
        sparse_scenarios.stale_metadata,
        sparse_scenarios.sink_with_splits,
        sparse_scenarios.nothing_to_attend,
        sparse_scenarios.graph_contents,
        sparse_scenarios.arguments,
        sparse_scenarios.odd_arguments,
        sparse_scenarios.unused_arguments,
    ],
    ids=lambda scenario: scenario.__name__,
)
def test_more_than_one_call(scenario, gpu):
    assert scenario(gpu).message is None
