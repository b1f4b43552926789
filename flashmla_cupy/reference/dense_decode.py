"""Dense decode by definition, in float64: every request attends to its own keys, found through its block table.

Written over the array namespace, so the same lines run on NumPy and on CuPy. Only pages that hold valid tokens are
gathered and the tail of the last page is dropped before any arithmetic, so nothing else can reach the result.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from flashmla_cupy.reference._numerics import namespace_of, round_to, widen

MODES = ("exact", "rounded", "rounded scores")
SCORE_BITS = {"rounded scores": 12}  # by mode, see softmax_of_rows
_CHUNK_BYTES = {"numpy": 256 << 20, "cupy": 4 << 30}  # temporaries of the requests that are computed together


def attend(
    q: Any,
    k_cache: Any,
    block_table: Any | None,
    cache_seqlens: Any,
    head_dim_v: int = 512,
    *,
    softmax_scale: float | None = None,
    causal: bool = False,
    mode: Literal["exact", "rounded", "rounded scores"] = "exact",
    round_output: bool = True,
    xp: Any = None,
) -> tuple[Any, Any]:
    """Attention of ``q`` over the cached keys; the values are the first ``head_dim_v`` numbers of the keys.

    Args:
        q: ``(batch, s_q, h_q, d_qk)`` floats.
        k_cache: paged ``(pages, page_size, h_kv, d_qk)`` or, with ``block_table=None``, ``(batch, s_k, h_kv, d_qk)``.
        block_table: ``(batch, width)`` page of each run of ``page_size`` tokens; entries past a length are not read.
        cache_seqlens: ``(batch,)`` tokens of each request. Negative counts as 0; what block table or cache cannot hold
            is clipped.
        softmax_scale: default ``d_qk ** -0.5``.
        causal: query i of s_q sees ``length - s_q + i + 1`` keys.
        mode: ``"rounded"`` rounds the weights ``exp(score - row maximum)`` to the type of q before they meet the
            values, and the output after: what the best kernel on 16-bit tensor cores could give. The sum of the
            weights is not rounded. ``"rounded scores"`` rounds the scores instead, to 2^-12 of the largest
            that vectors of their norms could have: as e4m3 tensor cores may, which sum products to 13 bits.
        round_output: False leaves out the last of these, the rounding of the output.
        xp: ``numpy`` or ``cupy``; default by the type of ``q``.

    Returns:
        ``out`` float64 ``(batch, s_q, h_q, head_dim_v)`` and ``lse`` float64 ``(batch, h_q, s_q)``, natural log, scale
        included. A row without keys gives 0 and -inf.

    Raises:
        ValueError: ``mode`` unknown or heads that do not divide.
    """
    check_mode(mode)
    xp = xp or namespace_of(q)
    batch, s_q, h_q, d_qk = q.shape
    h_kv = k_cache.shape[2]
    if h_q % h_kv:
        raise ValueError(f"h_q: got {h_q}, expected a multiple of h_kv = {h_kv}")
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    block_table = None if block_table is None else xp.asarray(block_table)
    weight_dtype = q.dtype if mode == "rounded" else None

    out = xp.zeros((batch, s_q, h_q, head_dim_v), np.float64)
    lse = xp.full((batch, h_q, s_q), -np.inf, np.float64)
    rows = s_q * h_q // h_kv
    chunk_bytes = _CHUNK_BYTES[xp.__name__]
    for length, requests in _equal_lengths(clipped_lengths(k_cache, block_table, cache_seqlens)):
        request_bytes = 8 * h_kv * length * (2 * d_qk + 4 * rows)  # keys and values, scores and what follows from them
        step = max(1, chunk_bytes // request_bytes)
        for begin in range(0, len(requests), step):
            chunk = xp.asarray(requests[begin : begin + step])
            n = len(chunk)
            keys = _gather(k_cache, block_table, chunk, length).transpose(0, 2, 1, 3)
            queries = q[chunk].reshape(n, s_q, h_kv, h_q // h_kv, d_qk).transpose(0, 2, 1, 3, 4)
            seen = None
            if causal:
                row_keys = length - s_q + 1 + xp.arange(rows) // (h_q // h_kv)
                seen = xp.arange(length) < row_keys[:, None]
            o, o_lse = softmax_of_rows(
                widen(queries).reshape(n, h_kv, rows, d_qk), widen(keys), head_dim_v, scale, seen, weight_dtype, xp,
                SCORE_BITS.get(mode),
            )
            if weight_dtype is not None and round_output:
                o = round_to(o, weight_dtype, xp)
            o = o.reshape(n, h_kv, s_q, h_q // h_kv, head_dim_v).transpose(0, 2, 1, 3, 4)
            o_lse = o_lse.reshape(n, h_kv, s_q, h_q // h_kv).transpose(0, 1, 3, 2)
            out[chunk] = o.reshape(n, s_q, h_q, head_dim_v)
            lse[chunk] = o_lse.reshape(n, h_q, s_q)
    return out, lse


def check_mode(mode: str) -> None:
    """Raises ValueError for a mode that the references do not have."""
    if mode not in MODES:
        raise ValueError(f"mode: got {mode!r}, expected {' or '.join(map(repr, MODES))}")


def softmax_of_rows(
    q: Any, keys: Any, d_v: int, scale: float, seen: Any | None, weight_dtype: Any | None, xp: Any,
    score_bits: int | None = None,
) -> tuple[Any, Any]:
    """q (n, h_kv, rows, d_qk), keys (n, h_kv, length, d_qk), both float64.

    seen: booleans that broadcast to (n, h_kv, rows, length), the keys that a row attends to; None: all.
    weight_dtype: what exp(score - maximum) is rounded to before it meets the values; None: not rounded.
    score_bits: scores are rounded to multiples of 2^-score_bits times the product of the norms; None: not rounded.

    Returns o (n, h_kv, rows, d_v) and lse (n, h_kv, rows), float64. A row without keys gives 0 and -inf.
    """
    with np.errstate(invalid="ignore", under="ignore"):  # infinities and NaNs among the keys take their course
        return _softmax_of_rows(q, keys, d_v, scale, seen, weight_dtype, score_bits, xp)


def _softmax_of_rows(q, keys, d_v, scale, seen, weight_dtype, score_bits, xp):
    scores = xp.matmul(q, keys.swapaxes(-1, -2))
    scores *= scale
    if score_bits is not None:
        norms = [xp.sqrt((x * x).sum(axis=-1)) for x in (q, keys)]
        quantum = 2.0**-score_bits * abs(scale) * norms[0][..., :, None] * norms[1][..., None, :]
        quantum = xp.where(quantum > 0, quantum, 1.0)
        scores = xp.rint(scores / quantum) * quantum
    if seen is not None:
        scores = xp.where(seen, scores, -np.inf)
    top = scores.max(axis=-1, keepdims=True)
    top = xp.where(top == -np.inf, 0.0, top)  # a row without keys: all weights become 0, not NaN
    scores -= top
    weights = xp.exp(scores, out=scores)
    total = weights.sum(axis=-1, keepdims=True)
    divisor = xp.where(total == 0, 1.0, total)
    if weight_dtype is not None:
        weights = round_to(weights, weight_dtype, xp)
    o = xp.matmul(weights, keys[..., :d_v])
    o /= divisor
    lse = xp.where(total == 0, -np.inf, top + xp.log(divisor))
    return o, lse[..., 0]


def clipped_lengths(k_cache: Any, block_table: Any | None, cache_seqlens: Any) -> np.ndarray:
    """Tokens of each request on the host, between 0 and what the cache can hold."""
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])
    lengths = cache_seqlens.get() if hasattr(cache_seqlens, "get") else np.asarray(cache_seqlens)
    return np.clip(lengths.astype(np.int64), 0, capacity)


def _equal_lengths(lengths: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """(length, requests of that length) for every length but 0."""
    values, group = np.unique(lengths, return_inverse=True)
    order = np.argsort(group, kind="stable")
    ends = np.cumsum(np.bincount(group, minlength=len(values)))
    for value, begin, end in zip(values.tolist(), [0, *ends[:-1].tolist()], ends.tolist(), strict=True):
        if value > 0:
            yield value, order[begin:end]


def _gather(k_cache: Any, block_table: Any | None, requests: Any, length: int) -> Any:
    """Valid tokens of ``requests`` (n,), all of ``length`` tokens: (n, length, h_kv, d_qk)."""
    if block_table is None:
        return k_cache[:, :length][requests]
    page_size = k_cache.shape[1]
    pages = block_table[:, : -(-length // page_size)][requests]
    tokens = k_cache[pages].reshape(len(requests), -1, *k_cache.shape[2:])
    return tokens[:, :length]
