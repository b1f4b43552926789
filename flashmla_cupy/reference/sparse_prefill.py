"""Sparse prefill by definition, in float64: every query token attends to the rows of a KV array that its indices name.

Written over the array namespace, so the same lines run on NumPy and on CuPy. Rows are gathered one by one: what no
valid index names is not read.
"""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from flashmla_cupy.reference import combine
from flashmla_cupy.reference._numerics import namespace_of, round_to, widen

_CHUNK_BYTES = {"numpy": 256 << 20, "cupy": 4 << 30}  # temporaries of the query tokens that are computed together


def attend(
    q: Any,
    kv: Any,
    indices: Any,
    sm_scale: float | None = None,
    d_v: int = 512,
    *,
    attn_sink: Any | None = None,
    topk_length: Any | None = None,
    cu_seqlens_q: Any | None = None,
    cu_seqlens_kv: Any | None = None,
    mode: Literal["exact", "rounded"] = "exact",
    round_output: bool = True,
    xp: Any = None,
) -> tuple[Any, Any, Any]:
    """Attention of every query token over the rows of ``kv`` that its indices name.

    Args:
        q: ``(s_q, h_q, d_qk)`` floats.
        kv: ``(s_kv, 1, d_qk)`` floats; the values are their first ``d_v`` numbers.
        indices: ``(s_q, topk)`` or ``(s_q, 1, topk)`` integers. Below 0 or not below ``s_kv``: no key. Named twice: two
            keys.
        sm_scale: default ``d_qk ** -0.5``.
        attn_sink: ``(h_q,)`` logits that enter the denominator of ``out``, and neither ``max_logits`` nor ``lse``.
        topk_length: ``(s_q,)``; later indices are no keys. Negative counts as 0.
        cu_seqlens_q, cu_seqlens_kv: ``(requests + 1,)`` offsets: the indices of tokens ``cu_seqlens_q[r]`` up to
            ``cu_seqlens_q[r + 1]`` count from row ``cu_seqlens_kv[r]`` and are below ``cu_seqlens_kv[r + 1]`` minus
            that. Tokens of no request have no keys.
        mode: ``"rounded"`` rounds the weights ``exp(score - row maximum)`` to the type of q before they meet the
            values, and the output: what the best kernel on 16-bit tensor cores could give.
        round_output: False leaves out the last of these, the rounding of the output.
        xp: ``numpy`` or ``cupy``; default by the type of ``q``.

    Returns:
        ``out`` float64 ``(s_q, h_q, d_v)``, ``max_logits`` (the largest scaled score) and ``lse`` (natural log of the
        sum of their exponentials) float64 ``(s_q, h_q)``. A row without keys gives 0, -inf and -inf.

    Raises:
        ValueError: ``mode`` unknown.
    """
    if mode not in ("exact", "rounded"):
        raise ValueError(f"mode: got {mode!r}, expected 'exact' or 'rounded'")
    xp = xp or namespace_of(q)
    s_q, h_q, d_qk = q.shape
    scale = d_qk**-0.5 if sm_scale is None else sm_scale
    weight_dtype = q.dtype if mode == "rounded" else None
    rows = _rows(kv, indices, topk_length, cu_seqlens_q, cu_seqlens_kv, xp)
    out = xp.zeros((s_q, h_q, d_v), np.float64)
    max_logits, lse = (xp.full((s_q, h_q), -np.inf, np.float64) for _ in range(2))
    step = max(1, _CHUNK_BYTES[xp.__name__] // max(1, 8 * rows.shape[1] * (3 * d_qk + 4 * h_q)))
    for begin in range(0, s_q, step):
        chunk = slice(begin, begin + step)
        with np.errstate(invalid="ignore", under="ignore"):  # infinities and NaNs among the keys take their course
            out[chunk], max_logits[chunk], lse[chunk] = _softmax(
                widen(q[chunk]), _keys(kv, rows[chunk], xp), d_v, scale, rows[chunk, None] >= 0, weight_dtype, xp
            )
    if attn_sink is not None:
        out, _ = combine.merge(out[None], lse[None], attn_sink=xp.asarray(attn_sink), xp=xp)
    if weight_dtype is not None and round_output:
        out = round_to(out, weight_dtype, xp)
    return out, max_logits, lse


def _softmax(q: Any, keys: Any, d_v: int, scale: float, seen: Any, weight_dtype: Any, xp: Any) -> tuple[Any, Any, Any]:
    """q (n, h_q, d_qk), keys (n, topk, d_qk), seen (n, 1, topk) -> out (n, h_q, d_v), max_logits, lse (n, h_q)."""
    scores = xp.where(seen, xp.matmul(q, keys.swapaxes(-1, -2)) * scale, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    base = xp.where(top == -np.inf, 0.0, top)  # a row without keys: all weights become 0, not NaN
    weights = xp.exp(scores - base)
    total = weights.sum(axis=-1, keepdims=True)
    divisor = xp.where(total == 0, 1.0, total)
    if weight_dtype is not None:
        weights = round_to(weights, weight_dtype, xp)
    lse = xp.where(total == 0, -np.inf, base + xp.log(divisor))
    return xp.matmul(weights, keys[..., :d_v]) / divisor, top[..., 0], lse[..., 0]


def _rows(kv: Any, indices: Any, length: Any | None, cu_q: Any | None, cu_kv: Any | None, xp: Any) -> Any:
    """Rows of kv that are keys, -1 for the rest: int64 (s_q, topk)."""
    indices = xp.asarray(indices).astype(np.int64)
    indices = indices[:, 0] if indices.ndim == 3 else indices
    s_q, topk = indices.shape
    first, count = xp.zeros(s_q, np.int64), xp.full(s_q, kv.shape[0], np.int64)
    if cu_q is not None:
        cu_q, cu_kv = (xp.asarray(x).astype(np.int64) for x in (cu_q, cu_kv))
        first, count = _ranges(s_q, kv.shape[0], cu_q, cu_kv, xp)
    valid = (indices >= 0) & (indices < count[:, None])
    if length is not None:
        valid &= xp.arange(topk) < xp.asarray(length)[:, None]
    return xp.where(valid, first[:, None] + indices, -1)


def _ranges(s_q: int, s_kv: int, cu_q: Any, cu_kv: Any, xp: Any) -> tuple[Any, Any]:
    """First row of kv, and how many, for each query token."""
    request = xp.searchsorted(cu_q, xp.arange(s_q), side="right") - 1
    known = (request >= 0) & (request < len(cu_q) - 1)
    request = xp.where(known, request, 0)
    first = xp.clip(cu_kv[request], 0, s_kv)
    last = xp.minimum(cu_kv[xp.minimum(request + 1, len(cu_kv) - 1)], s_kv)
    return first, xp.where(known, xp.maximum(last - first, 0), 0)


def _keys(kv: Any, rows: Any, xp: Any) -> Any:
    """Keys float64 (n, topk, d_qk); zeros for rows below 0, which are not read."""
    keys = xp.zeros((*rows.shape, kv.shape[2]), np.float64)
    where = xp.nonzero(rows >= 0)
    if len(where[0]):
        keys[where] = widen(kv[rows[where], 0])
    return keys
