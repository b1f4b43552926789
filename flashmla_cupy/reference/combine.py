"""Merging partial attention results by their log-sum-exps, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from flashmla_cupy.reference._numerics import namespace_of, widen


@np.errstate(invalid="ignore", under="ignore")  # a weight may be too small for a float64, however NumPy is set
def merge(outs: Any, lses: Any, *, attn_sink: Any | None = None, xp: Any = None) -> tuple[Any, Any]:
    """One result from ``n`` partial results over disjoint keys.

    Args:
        outs: ``(n, ..., d_v)`` partial results, each normalised over its own keys.
        lses: ``(n, ...)`` their log-sum-exps, natural log. A partial result of -inf has no weight, whatever it holds.
        attn_sink: logits that broadcast against ``(...)``, say ``(h_q,)`` where the last axis is the head. It enters
            the denominator of ``out`` once and leaves ``lse`` alone; +inf makes the output 0, NaN makes it NaN where
            there is any.
        xp: ``numpy`` or ``cupy``; default by the type of ``outs``.

    Returns:
        ``out`` float64 ``(..., d_v)`` and ``lse`` float64 ``(...)``; 0 and -inf where every partial result is empty.
    """
    xp = xp or namespace_of(outs)
    outs, lses = widen(outs), widen(lses)
    top = lses.max(axis=0)
    top = xp.where(top == -np.inf, 0.0, top)
    weights = xp.exp(lses - top)
    total = weights.sum(axis=0)
    empty = total == 0
    divisor = xp.where(empty, 1.0, total)
    lse = xp.where(empty, -np.inf, top + xp.log(divisor))

    weights = (weights / divisor)[..., None]
    out = (weights * xp.where(weights > 0, outs, 0.0)).sum(axis=0)
    if attn_sink is not None:
        sink = widen(attn_sink)
        above = sink - xp.where(empty, 0.0, lse)
        share = xp.where(above >= 700.0, 0.0, 1.0 / (1.0 + xp.exp(xp.minimum(above, 700.0))))  # exp(710) overflows
        out = out * xp.where(empty, 1.0, share)[..., None]
    return out, lse
