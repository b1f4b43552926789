"""Sparse decode, and dense decode over an FP8 cache, by definition and in float64.

Written over the array namespace, so the same lines run on NumPy and on CuPy. Tokens are gathered one by one: what no
valid index names is not read. FP8 codes meet their exact float32 (or power-of-two) scales in float64, where the product
is exact.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np

from flashmla_cupy.kv_format import FORMATS, KVFormat
from flashmla_cupy.reference import combine, dense_decode, kv_quant
from flashmla_cupy.reference._numerics import namespace_of, round_to, widen

_CHUNK_BYTES = {"numpy": 256 << 20, "cupy": 4 << 30}  # temporaries of the query tokens that are computed together
_KV_DTYPE = np.dtype(ml_dtypes.bfloat16)  # what dequantized keys and values are rounded to in "rounded" mode
_CODE_VALUES = kv_quant.decode_e4m3(np.arange(256, dtype=np.uint8)).astype(np.float64)
with np.errstate(over="ignore"):  # byte 255, which is NaN
    _UE8M0_VALUES = kv_quant.scale_values(np.arange(256, dtype=np.uint8)).astype(np.float64)
_FORMATS = {layout.d_qk: layout for layout in FORMATS.values()}


def attend(
    q: Any,
    k_cache: Any,
    indices: Any,
    head_dim_v: int = 512,
    *,
    softmax_scale: float | None = None,
    topk_length: Any | None = None,
    attn_sink: Any | None = None,
    extra_k_cache: Any | None = None,
    extra_indices: Any | None = None,
    extra_topk_length: Any | None = None,
    mode: Literal["exact", "rounded", "rounded scores"] = "exact",
    round_output: bool = True,
    xp: Any = None,
) -> tuple[Any, Any]:
    """Attention of every query token over the cached tokens that its indices name.

    Args:
        q: ``(batch, s_q, h_q, d_qk)`` floats.
        k_cache: ``(pages, page_size, h_kv, d_qk)`` floats, or FP8 of one-byte elements ``(pages, page_size, 1,
            bytes_per_token)`` in the layout of kv_format for ``d_qk``.
        indices: ``(batch, s_q, topk)`` or ``(batch, s_q, h_kv, topk)`` integers, slots ``page * page_size + offset``.
            Below 0 or beyond the cache: no key. Named twice: two keys.
        head_dim_v: the values are the first ``head_dim_v`` numbers of the keys.
        softmax_scale: default ``d_qk ** -0.5``.
        topk_length: ``(batch,)``; later indices are no keys. Negative counts as 0.
        attn_sink: ``(h_q,)`` logits that enter the denominator of ``out`` once, and not ``lse``.
        extra_k_cache, extra_indices, extra_topk_length: a second cache and selection; attention is over both.
        mode: ``"rounded"`` rounds dequantized keys to float32 and then to bfloat16, the weights ``exp(score - row
            maximum)`` to the type of q before they meet the values, and the output: what the best kernel on 16-bit
            tensor cores could give. ``"rounded scores"``: as in dense_decode.
        round_output: False leaves out the last of these, the rounding of the output.
        xp: ``numpy`` or ``cupy``; default by the type of ``q``.

    Returns:
        ``out`` float64 ``(batch, s_q, h_q, head_dim_v)`` and ``lse`` float64 ``(batch, h_q, s_q)``, natural log, scale
        included. A row without keys gives 0 and -inf.

    Raises:
        ValueError: ``mode`` unknown or heads that do not divide.
    """
    xp = xp or namespace_of(q)
    dense_decode.check_mode(mode)
    batch, s_q, h_q, d_qk = q.shape
    h_kv = k_cache.shape[2]
    if h_q % h_kv:
        raise ValueError(f"h_q: got {h_q}, expected a multiple of h_kv = {h_kv}")
    scale = d_qk**-0.5 if softmax_scale is None else softmax_scale
    weight_dtype = q.dtype if mode == "rounded" else None
    caches = [(k_cache, _slots(k_cache, indices, topk_length, xp))]
    if extra_k_cache is not None:
        caches.append((extra_k_cache, _slots(extra_k_cache, extra_indices, extra_topk_length, xp)))

    tokens, group = batch * s_q, h_q // h_kv
    queries = q.reshape(tokens, h_kv, group, d_qk)
    out = xp.zeros((tokens, h_kv, group, head_dim_v), np.float64)
    lse = xp.full((tokens, h_kv, group), -np.inf, np.float64)
    lanes = sum(slots.shape[-1] for _, slots in caches)
    token_bytes = 8 * lanes * (4 * h_kv * d_qk + 4 * h_q)  # keys and how they come about, scores and what follows
    step = max(1, _CHUNK_BYTES[xp.__name__] // token_bytes)
    for begin in range(0, tokens, step):
        chunk = slice(begin, begin + step)
        keys = [_keys(cache, slots[chunk], d_qk, mode, xp) for cache, slots in caches]
        keys = keys[0] if len(keys) == 1 else xp.concatenate(keys, axis=2)
        seen = xp.concatenate([slots[chunk] >= 0 for _, slots in caches], axis=2)
        out[chunk], lse[chunk] = dense_decode.softmax_of_rows(
            widen(queries[chunk]), keys, head_dim_v, scale, seen[:, :, None], weight_dtype, xp,
            dense_decode.SCORE_BITS.get(mode),
        )
    out, lse = out.reshape(batch, s_q, h_q, head_dim_v), lse.reshape(batch, s_q, h_q)
    if attn_sink is not None:
        out, _ = combine.merge(out[None], lse[None], attn_sink=xp.asarray(attn_sink), xp=xp)
    if weight_dtype is not None and round_output:
        out = round_to(out, weight_dtype, xp)
    return out, lse.transpose(0, 2, 1)


def attend_paged(
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
    """``dense_decode.attend`` over an FP8 cache of one-byte elements.

    The cache is ``(pages, page_size, 1, bytes_per_token)`` or, with ``block_table=None``, ``(batch, s_k, 1,
    bytes_per_token)``. ``"rounded"`` also rounds the dequantized keys to bfloat16. Otherwise arguments, results and
    errors are those of ``dense_decode.attend``.
    """
    xp = xp or namespace_of(q)
    dense_decode.check_mode(mode)
    batch, s_q, h_q, d_qk = q.shape
    page_size = k_cache.shape[1]
    lengths = dense_decode.clipped_lengths(k_cache, block_table, cache_seqlens)
    longest = int(lengths.max(initial=0))
    positions = xp.arange(longest)
    block_table = None if block_table is None else xp.asarray(block_table).astype(np.int64)
    out = xp.zeros((batch, s_q, h_q, head_dim_v), np.float64)
    lse = xp.full((batch, h_q, s_q), -np.inf, np.float64)
    step = max(1, _CHUNK_BYTES[xp.__name__] // max(1, 8 * longest * 4 * d_qk))
    for begin in range(0, batch if longest else 0, step):
        chunk = slice(begin, begin + step)
        if block_table is None:
            slots = xp.arange(batch)[chunk, None] * page_size + positions
        else:
            slots = block_table[chunk][:, positions // page_size] * page_size + positions % page_size
        slots = xp.where(positions < xp.asarray(lengths[chunk])[:, None], slots, -1)
        keys = _keys(k_cache, slots[:, None], d_qk, mode, xp).swapaxes(1, 2)
        out[chunk], lse[chunk] = dense_decode.attend(
            q[chunk], keys, None, lengths[chunk], head_dim_v, softmax_scale=softmax_scale, causal=causal, mode=mode,
            round_output=round_output, xp=xp,
        )
    return out, lse


def _slots(cache: Any, indices: Any, length: Any | None, xp: Any) -> Any:
    """Slots that are keys, -1 for the rest: int64 (batch * s_q, h_kv, topk)."""
    pages, page_size, h_kv = cache.shape[:3]
    slots = xp.asarray(indices).astype(np.int64)
    slots = slots[:, :, None] if slots.ndim == 3 else slots
    batch, s_q, _, topk = slots.shape
    valid = (slots >= 0) & (slots < pages * page_size)
    if length is not None:
        valid &= xp.arange(topk) < xp.asarray(length).reshape(batch, 1, 1, 1)
    slots = xp.broadcast_to(xp.where(valid, slots, -1), (batch, s_q, h_kv, topk))
    return slots.reshape(batch * s_q, h_kv, topk)


def _keys(cache: Any, slots: Any, d_qk: int, mode: str, xp: Any) -> Any:
    """Keys float64 (n, h_kv, lanes, d_qk) at slots (n, h_kv, lanes); zeros for slots below 0, which are not read."""
    keys = xp.zeros((*slots.shape, d_qk), np.float64)
    where = xp.nonzero(slots >= 0)
    if len(where[0]) == 0:
        return keys
    pages, offsets = slots[where] // cache.shape[1], slots[where] % cache.shape[1]
    if cache.dtype.itemsize > 1:
        keys[where] = widen(cache[pages, offsets, where[1]])
        return keys
    values = _dequantized(cache, pages, offsets, _FORMATS[d_qk], xp)
    if mode == "rounded":  # the product of code and scale is a float32 before it is a bfloat16, and a tie shows in lse
        values = round_to(round_to(values, np.float32, xp), _KV_DTYPE, xp)
    keys[where] = values
    return keys


def _dequantized(cache: Any, pages: Any, offsets: Any, layout: KVFormat, xp: Any) -> Any:
    """Exact values float64 (n, d_qk) of the tokens at (pages, offsets) of an FP8 cache."""
    as_strided = xp.lib.stride_tricks.as_strided
    page_count, page_size, page_stride = *cache.shape[:2], cache.strides[0]
    page_bytes = page_size * layout.bytes_per_token
    bytes_of_pages = as_strided(cache.view(np.uint8), (page_count, page_bytes), (page_stride, 1))

    def rows(offset: int, stride: int, nbytes: int) -> Any:
        """uint8 (n, nbytes): what lies at ``offset + stride * token`` in the pages."""
        view = as_strided(bytes_of_pages[:, offset:], (page_count, page_size, nbytes), (page_stride, stride, 1))
        return xp.ascontiguousarray(view[pages, offsets])

    codes = rows(0, layout.row_bytes, layout.d_nope)
    rope = rows(layout.rope_offset, layout.row_bytes, 2 * layout.d_rope).view(_KV_DTYPE)
    scales = rows(layout.scale_offset(page_size), layout.scale_stride, layout.scale_bytes)
    if layout.scale == "float32":
        scales = scales.view(np.float32).astype(np.float64)
    else:
        scales = xp.asarray(_UE8M0_VALUES)[scales]
    values = xp.asarray(_CODE_VALUES)[codes].reshape(-1, layout.tiles, layout.tile)
    values *= scales[:, : layout.tiles, None]
    return xp.concatenate([values.reshape(-1, layout.d_nope), widen(rope)], axis=1)
