"""Planned calls: what a call needs beyond its pointers, kept by everything about its arguments that this depends on.

A plan is made once per (shapes, strides, types, alignment, devices) and serves every later call that has the same.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import cupy

MAX_PLANS = 1024
_SCALAR_TYPES = (int, float, bool)
PLANS: dict[tuple, Any] = {}


def signature(x: Any) -> Any:
    """What a plan depends on of one argument; equal for two arrays that one plan can serve."""
    if x is None:
        return None
    if type(x) is not cupy.ndarray:
        return type(x)  # never planned: such arrays are staged
    memory = x.data
    return x.shape, x.strides, x.dtype, memory.device_id, memory.ptr & 15


def key_of(op: str, arguments: dict[str, Any]) -> tuple:
    """What a plan of a call depends on: scalars with their types (True is not 1.0), and signatures of the arrays."""
    values = arguments.values()
    return op, *((type(x), x) if type(x) in _SCALAR_TYPES else signature(x) for x in values)


def remember(key: tuple, plan: Any) -> None:
    if len(PLANS) >= MAX_PLANS:
        PLANS.clear()
    PLANS[key] = plan


def clear_plans() -> None:
    """Forget planned calls, so that the next ones take their kernels anew (after an edit of cuda_src)."""
    PLANS.clear()


@contextlib.contextmanager
def while_set(namespace: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    """Within, the variable `name` of a module (its globals()) is `value`; plans that hold what it chose are gone."""
    before, namespace[name] = namespace[name], value
    clear_plans()
    try:
        yield
    finally:
        namespace[name] = before
        clear_plans()
