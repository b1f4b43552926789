"""GPU tests also run experimental kernels: they are how such a kernel earns its record."""

from __future__ import annotations

import pytest

from flashmla_cupy.ops._select import experimental_kernels
from flashmla_cupy.ops.sparse_decode import with_codes


@pytest.fixture(autouse=True, scope="session")
def experimental():
    """No call gets the kernel that multiplies codes unless it is asked for: budgets are those of the others."""
    with experimental_kernels(), with_codes(False):
        yield
