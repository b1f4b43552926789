"""GPU tests also run experimental kernels: they are how such a kernel earns its record."""

from __future__ import annotations

import pytest

from flashmla_cupy.ops._select import experimental_kernels


@pytest.fixture(autouse=True, scope="session")
def experimental():
    with experimental_kernels():
        yield
