"""The CUDA driver API through cuda-bindings, imported at first use, and its return codes as errors."""

from __future__ import annotations

import ctypes
import functools
from types import ModuleType

from ..errors import FlashMLAError


@functools.cache
def cu() -> ModuleType:
    from cuda.bindings import driver

    return driver


@functools.cache
def entry_point(name: str):
    """A driver function through ctypes, returning its int code. Raises OSError without a driver."""
    return getattr(ctypes.CDLL("libcuda.so.1"), name)


def check(result: object, doing: str) -> None:
    """Raise FlashMLAError naming the CUDA error and what was being done, unless `result` (a CUresult) is success."""
    if result == 0:
        return
    (_, name), (_, text) = cu().cuGetErrorName(result), cu().cuGetErrorString(result)
    raise FlashMLAError(f"{doing}: {_text(name) or result} ({_text(text)})")


def _text(value: bytes | str | None) -> str:
    return value.decode() if isinstance(value, bytes) else value or ""
