"""How far a kernel may be from the truth: twice as far as a reference that only rounds where 16-bit hardware must.

Both functions return error / allowed error, so 1 is the limit, in a form that a NaN fails: ``ratio <= 1`` is the test.
Infinities and NaNs must sit at the same places as in the truth; elsewhere they make the ratio infinite.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashmla_cupy.reference._numerics import namespace_of, round_to, unit_roundoff

OUT_FACTOR = 2.0
# Part of one rounding of the largest output by which float32 accumulation in another order may differ. It is always
# allowed, where the reference happens to be exact. And the reference's own error is the worst that its output may have
# when it is rounded from that much to either side: at the middle between two 16-bit numbers it is chance which of them
# it becomes, and a more precise result may become the other.
OUT_FLOOR_ROUNDINGS = 2.0**-6
LSE_ABSOLUTE, LSE_RELATIVE = 5e-5, 2e-5


def out_error_ratio(
    out: Any, exact: Any, rounded: Any, dtype: Any, *, per_request: bool = False, xp: Any = None
) -> Any:
    """Error of ``out`` over the budget, the worse of two measures: maximum absolute error and RMS error.

    Args:
        out: ``(batch, ...)`` what the kernel gave, widened to float64.
        exact, rounded: the references, float64, same shape; the output of the second rounded to dtype, or not yet.
        dtype: element type of the kernel's output.
        per_request: measure every entry of the first axis by itself, so that large values in one request cannot hide
            errors in another.

    Returns:
        scalar array, or ``(batch,)`` with ``per_request``; at most 1 is right.
    """
    xp = xp or namespace_of(exact)
    if out.size == 0:
        return xp.zeros(out.shape[:1] if per_request else ())
    axes = tuple(range(1 if per_request else 0, exact.ndim))
    finite = xp.isfinite(exact)
    out_where, exact_where, rounded_where = (xp.where(finite, x, 0.0) for x in (out, exact, rounded))
    floor = OUT_FLOOR_ROUNDINGS * unit_roundoff(dtype) * abs(exact_where).max(axis=axes)
    floor = xp.maximum(floor, np.finfo(np.float64).tiny)  # all zeros: 0 / tiny is 0
    aside = floor.reshape(floor.shape + (1,) * (exact.ndim - floor.ndim))
    error = abs(out_where - exact_where)
    own_error = xp.maximum(*(abs(round_to(rounded_where + x, dtype, xp) - exact_where) for x in (-aside, aside)))

    ratio = error.max(axis=axes) / (OUT_FACTOR * own_error.max(axis=axes) + floor)
    rms_ratio = _rms(error, axes, xp) / (OUT_FACTOR * _rms(own_error, axes, xp) + floor)
    misplaced = _misplaced(out, exact, xp).any(axis=axes)
    return xp.where(misplaced, np.inf, xp.maximum(ratio, rms_ratio))


def lse_error_ratio(lse: Any, exact: Any, rounded: Any | None = None, *, xp: Any = None) -> Any:
    """Error of natural-log ``lse`` over the budget, element by element, same shape.

    The budget is ``LSE_ABSOLUTE + LSE_RELATIVE * |exact|`` and, where ``rounded`` is given, OUT_FACTOR times the worst
    error of that in the same request (entry of the first axis): 16-bit keys move scores, and with them their sum.
    """
    xp = xp or namespace_of(exact)
    finite = xp.isfinite(exact)
    safe_exact = xp.where(finite, exact, 0.0)
    error = abs(xp.where(finite, lse, 0.0) - safe_exact)
    allowed = LSE_ABSOLUTE + LSE_RELATIVE * abs(safe_exact)
    if rounded is not None and exact.size:
        own_error = xp.where(finite & xp.isfinite(rounded), abs(rounded - safe_exact), 0.0)
        allowed = allowed + OUT_FACTOR * own_error.max(axis=tuple(range(1, exact.ndim)), keepdims=True)
    return xp.where(_misplaced(lse, exact, xp), np.inf, error / allowed)


def _misplaced(got: Any, exact: Any, xp: Any) -> Any:
    """True where one is NaN, +inf or -inf and the other is not."""
    return (
        (xp.isnan(got) != xp.isnan(exact))
        | (xp.isposinf(got) != xp.isposinf(exact))
        | (xp.isneginf(got) != xp.isneginf(exact))
    )


def _rms(values: Any, axes: tuple[int, ...], xp: Any) -> Any:
    return xp.sqrt((values * values).mean(axis=axes))
