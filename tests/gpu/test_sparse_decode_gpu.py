"""Sparse FP8 decode on the GPU: the smoke and corner suites, and checks of more than one call."""

from __future__ import annotations

from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest

import flashmla_cupy
from flashmla_cupy.ops.sparse_decode import with_codes
from flashmla_cupy.testing import machine, sparse_cases, sparse_checks, sparse_scenarios

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True, params=[False, True], ids=["keys to bfloat16", "codes"])
def codes(request) -> Iterator[None]:
    """Every test by the kernel that makes bfloat16 of keys, and by the one that multiplies codes, where it may be."""
    with with_codes(request.param):
        yield


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


def test_rows_of_q_that_are_not_finite(gpu):
    """NaN where they see a token, in some splits or all, and nothing where they see none; others are as before."""
    rng, heads = np.random.default_rng(0), {5: (7, np.nan), 9: (570, np.inf), 11: (3, -np.inf)}
    cache = flashmla_cupy.quantize_kv_cache(gpu.xp.asarray(rng.standard_normal((64, 64, 1, 576), np.float32)))
    indices = rng.integers(0, 4096, (3, 1, 200), np.int32)
    indices[0], indices[1, 0, :150] = -1, -1
    q = rng.standard_normal((3, 1, 64, 576), np.float32)
    plan = flashmla_cupy.get_mla_metadata(gpu.xp.zeros(3, np.int32), 64, 1, 64, True, 200)

    def decode(q):
        q = gpu.xp.asarray(q.astype(ml_dtypes.bfloat16))
        out, lse = flashmla_cupy.flash_mla_with_kvcache(q, cache, None, None, 512, *plan, False, True,
                                                        gpu.xp.asarray(indices))
        return out.get()[:, 0].astype(np.float32), lse.get()[..., 0]

    finite_out, finite_lse = decode(q)
    for head, (dim, value) in heads.items():
        q[:, :, head, dim] = value
    out, lse = decode(q)
    others = [head for head in range(64) if head not in heads]
    np.testing.assert_array_equal(out[:, others], finite_out[:, others])
    np.testing.assert_array_equal(lse[:, others], finite_lse[:, others])
    assert (out[0] == 0).all() and (lse[0] == -np.inf).all()
    assert np.isnan(out[1:, list(heads)]).all() and np.isnan(lse[1:, list(heads)]).all()
