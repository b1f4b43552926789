"""Dense decode on the GPU: the smoke suite, and the inputs that broke other libraries."""

from __future__ import annotations

import pytest

from flashmla_cupy.testing import cases, checks, machine, scenarios

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> machine.Machine:
    return machine.detect()


def _check(case: cases.Case, gpu: machine.Machine) -> None:
    errors = checks.dense(case, gpu)
    assert errors.message is None, f"{case.name}: {errors.message}"


@pytest.mark.parametrize("case", cases.smoke(), ids=lambda case: case.name)
def test_smoke(case, gpu):
    _check(case, gpu)


@pytest.mark.parametrize("case", cases.corner(), ids=lambda case: case.name)
def test_corner(case, gpu):
    """Empty requests and pools, poisoned tails, tile remainders, head counts, unused table entries, views, scales."""
    _check(case, gpu)


def test_pages_beyond_31_bit_addresses(gpu):
    if gpu.xp.cuda.runtime.memGetInfo()[0] < 12e9:
        pytest.skip("needs 12 GB of free GPU memory")
    assert scenarios.far_pages(gpu).message is None


def test_cache_cut_in_two_and_merged(gpu):
    assert scenarios.merge_halves(gpu).message is None


def test_plan_of_other_lengths(gpu):
    assert scenarios.stale_metadata(gpu).message is None


def test_graph_follows_lengths(gpu):
    assert scenarios.graph_lengths(gpu).message is None


@pytest.mark.parametrize("pdl", [True, False], ids=["pdl", "no_pdl"])
def test_repetition_is_bit_identical(gpu, pdl):
    assert scenarios.repetition(gpu, pdl).message is None


def test_wrong_arguments(gpu):
    assert scenarios.arguments(gpu).message is None


def test_odd_arguments(gpu):
    assert scenarios.odd_arguments(gpu).message is None
