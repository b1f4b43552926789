"""Whether a result is right, in words: the rule of reference/error_budget, request by request, with the place of the
worst element. Written so that a NaN anywhere fails; positions of infinities and NaNs are compared before any value.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashmla_cupy.reference import error_budget


@dataclass(frozen=True)
class Errors:
    """Worst error as a fraction of what is allowed (1 is the limit); `message` says what is wrong, None if nothing."""

    out: float = 0.0
    lse: float = 0.0
    message: str | None = None


def compare(out: Any, lse: Any, exact: tuple[Any, Any], rounded: tuple[Any, Any], xp: Any = np) -> Errors:
    """out (batch, s_q, h_q, d_v), lse (batch, h_q, s_q) against (out, lse) of the exact and the rounding reference."""
    message = _shapes(out, lse, *exact)
    if message or 0 in out.shape:
        return Errors(message=message)
    dtype = out.dtype
    out, lse = out.astype(np.float32).astype(np.float64), lse.astype(np.float64)
    out_ratios = error_budget.out_error_ratio(out, exact[0], rounded[0], dtype, per_request=True, xp=xp)
    lse_ratios = error_budget.lse_error_ratio(lse, exact[1], rounded[1], xp=xp)
    out_ratio, lse_ratio = float(out_ratios.max()), float(lse_ratios.max())
    if not out_ratio <= 1:
        request = int((~(out_ratios <= 1)).argmax())
        message = _describe("out", out, exact[0], request, out_ratio, xp)
    elif not lse_ratio <= 1:
        request = int((~(lse_ratios <= 1)).any(axis=(1, 2)).argmax())
        message = _describe("lse", lse, exact[1], request, lse_ratio, xp)
    return Errors(out_ratio, lse_ratio, message)


def _shapes(out: Any, lse: Any, exact_out: Any, exact_lse: Any) -> str | None:
    for label, got, expected in (("out", out, exact_out), ("lse", lse, exact_lse)):
        if tuple(got.shape) != tuple(expected.shape):
            return f"{label}: got shape {tuple(got.shape)}, expected {tuple(expected.shape)}"
    return None


def _describe(label: str, got: Any, expected: Any, request: int, ratio: float, xp: Any) -> str:
    """Names the first element of `request` that is not finite where it should be, or else the farthest off."""
    got, expected = got[request], expected[request]
    both_nan = xp.isnan(got) & xp.isnan(expected)
    misplaced = ~((got == expected) | both_nan | (xp.isfinite(got) & xp.isfinite(expected)))
    count = int(misplaced.sum())
    distance = xp.where(xp.isfinite(got) & xp.isfinite(expected), abs(got - expected), 0.0)
    place = tuple(int(i) for i in np.unravel_index(int((misplaced if count else distance).argmax()), got.shape))
    what = (
        f"{count} elements of request {request} not finite where they should be"
        if count
        else f"{ratio:.3g} x the allowed error"
    )
    return (
        f"{label}: {what}, at {(request, *place)}: got {float(got[place]):.7g}, expected {float(expected[place]):.7g}"
    )
