"""The plan of the device kernel equals its NumPy twin bit for bit, at any batch."""

from __future__ import annotations

import pytest

from flashmla_cupy.testing import checks, machine

pytestmark = pytest.mark.gpu
ROWS = checks.sched_meta_lengths("full")


@pytest.fixture(scope="module")
def gpu() -> machine.Machine:
    return machine.detect()


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_bit_identical_with_the_numpy_twin(row, gpu):
    _, lengths, q_rows, h_kv, topk = row
    assert checks.sched_meta(lengths, q_rows, h_kv, gpu, topk).message is None


def test_batches_without_limit_are_among_the_rows():
    assert {len(row[1]) for row in ROWS} >= {1, 11622, 11623, 32768, 100000}
