"""Running a call whose outputs lie inside guard bands, and comparing what two calls wrote bit by bit."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import flashmla_cupy
from flashmla_cupy.testing.compare import Errors
from flashmla_cupy.testing.machine import Machine


def run_guarded(call: Callable[[], tuple[Any, Any]], given: Any, machine: Machine) -> tuple[Any, Any] | Errors:
    """The bits of `given.out` and `given.lse` after `call`, or what is wrong with where it wrote."""
    out, lse = call()
    machine.wait()
    for label, guarded, returned in (("out", given.out, out), ("lse", given.lse, lse)):
        if not guarded.outside_untouched():
            return Errors(message=f"{label}: elements outside the view were written")
        if tuple(returned.shape) != tuple(guarded.array.shape):
            return Errors(message=f"{label}: returned shape {returned.shape}, expected {guarded.array.shape}")
    return given.out.array.view(np.uint16).copy(), given.lse.array.view(np.uint32).copy()


def same_bits(a: tuple[Any, Any], b: tuple[Any, Any]) -> bool:
    return all(bool((x == y).all()) for x, y in zip(a, b, strict=True))


def refuses(call: Callable[..., Any], wrong: list[tuple[str, dict[str, Any]]], machine: Machine) -> Errors:
    """Whether call(**change) names the argument that is wrong, for each (name, change)."""
    for name, change in wrong:
        try:
            call(**change)
        except (TypeError, ValueError, NotImplementedError, flashmla_cupy.FlashMLAError) as error:
            if name not in str(error):
                return Errors(message=f"wrong {name}: the message does not name it: {error}")
        else:
            return Errors(message=f"wrong {name} ({sorted(change)}) was accepted")
    machine.wait()
    return Errors()
