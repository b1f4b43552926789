"""merge_states on the GPU: any number of partial results, empty ones among them."""

from __future__ import annotations

import pytest

from flashmla_cupy.testing import checks, machine

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def gpu() -> machine.Machine:
    return machine.detect()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("shape", [(2, 1, 16), (1, 3, 5), (4, 2, 128)], ids=str)
@pytest.mark.parametrize("count", checks.COMBINE_COUNTS)
def test_any_number_of_partial_results(count, shape, dtype, gpu):
    errors = checks.combine(count, shape, dtype, gpu)
    assert errors.message is None, errors.message
