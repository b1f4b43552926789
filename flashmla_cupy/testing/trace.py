"""Watching launches: which kernels a call runs, and what a call costs the host without them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock


@contextlib.contextmanager
def launches(stub: bool = False) -> Iterator[list[str]]:
    """Yields a list that gets the spec name of each kernel launched inside; with `stub` nothing reaches the GPU."""
    from flashmla_cupy.runtime.launch import Kernel

    names: list[str] = []
    real = Kernel.launch

    def launch(kernel: Any, *args: Any, **kwargs: Any) -> Any:
        names.append(kernel.spec.name)
        return None if stub else real(kernel, *args, **kwargs)

    with mock.patch.object(Kernel, "launch", launch):
        yield names
