"""Arrays of a dense decode case, built hostile: everything a kernel must not read is NaN or Inf, unused block-table
entries point nowhere, outputs are pre-filled with NaN inside guard bands. Written over the array namespace (`xp` is
numpy or cupy); on a GPU nothing but block tables and lengths crosses the bus.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from flashmla_cupy.testing.cases import CONTIGUOUS, HEAD_DIM_V, Case

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}
_POISON_BITS = {
    ("bfloat16", "nan"): 0x7FC0,
    ("bfloat16", "inf"): 0x7F80,
    ("float16", "nan"): 0x7E00,
    ("float16", "inf"): 0x7C00,
    ("bfloat16", "zero"): 0,
    ("float16", "zero"): 0,
}
_GUARD_BITS = {2: 0x7FFF, 4: 0x7FFFFFFF}  # a NaN in bf16, fp16 and float32
_BASE_COUNT = 4194301  # prime, so rows of any width start at different places when the base is repeated
_PAD = 8  # elements: keeps rows of padded 16-bit layouts on 16-byte boundaries


@dataclass
class Guarded:
    """An output array inside a larger buffer of one bit pattern (a NaN), to see unwritten and overwritten elements."""

    buffer: Any  # unsigned bits
    select: Callable[[Any], Any]
    dtype: np.dtype

    @property
    def array(self) -> Any:
        return self.select(self.buffer).view(self.dtype)

    def refill(self) -> None:
        self.buffer[...] = self.buffer.dtype.type(_GUARD_BITS[self.dtype.itemsize])

    def outside_untouched(self) -> bool:
        """Whether every element outside the view still holds the pattern (reads the buffer; synchronises)."""
        pattern = self.buffer.dtype.type(_GUARD_BITS[self.dtype.itemsize])
        copy = self.buffer.copy()
        self.select(copy)[...] = pattern
        return bool((copy == pattern).all())


@dataclass
class Inputs:
    """What one call is given. block_table is None for a contiguous cache."""

    q: Any  # (batch, s_q, h_q, d_qk)
    k_cache: Any  # (pages, page_size, h_kv, d_qk), contiguous: (batch, s_k, h_kv, d_qk)
    block_table: Any  # (batch, width) int32 | None
    cache_seqlens: Any  # (batch,) int32
    out: Guarded  # (batch, s_q, h_q, 512)
    lse: Guarded  # (batch, h_q, s_q) float32


def build(case: Case, xp: Any = np) -> Inputs:
    """The arrays of `case`, the same bits for every `xp`."""
    batch, dtype = case.batch, DTYPES[case.dtype]
    rng = np.random.default_rng(case.seed)
    q_bits = random_bits(xp, case.dtype, (batch, case.s_q, case.h_q, case.d_qk), 2 * case.seed, case.q_gain)
    q_guard = guarded(xp, case.q_layout, q_bits.shape, dtype)
    q_guard.select(q_guard.buffer)[...] = q_bits
    if case.page_size == CONTIGUOUS:
        cache, table = _contiguous_cache(case, xp), None
    else:
        cache, table = _paged_cache(case, xp, rng)
    out = guarded(xp, case.out_layout, (batch, case.s_q, case.h_q, HEAD_DIM_V), dtype)
    lse = guarded_lse(xp, case.out_layout, (batch, case.h_q, case.s_q))
    return Inputs(q_guard.array, cache, table, xp.asarray(np.asarray(case.lengths, np.int32).reshape(batch)), out, lse)


def random_array(xp: Any, dtype: str, shape: tuple[int, ...], seed: int, deviation: float = 1.0) -> Any:
    """Normal values of a 16-bit type or float32, deterministic in the arguments and the same for every `xp`."""
    return random_bits(xp, dtype, shape, seed, deviation).view(DTYPES[dtype])


@functools.lru_cache(maxsize=16)
def _base(xp: Any, dtype: str, gain: float, device: int) -> Any:
    values = np.random.default_rng(0).standard_normal(_BASE_COUNT, dtype=np.float32) * np.float32(gain)
    bits = values.astype(DTYPES[dtype]).view(np.uint32 if dtype == "float32" else np.uint16)
    return xp.asarray(bits)


def random_bits(xp: Any, dtype: str, shape: tuple[int, ...], seed: int, gain: float = 1.0) -> Any:
    count = math.prod(shape)
    start = seed * 7919 % _BASE_COUNT
    base = _base(xp, dtype, gain, 0 if xp is np else int(xp.cuda.Device().id))
    repeats = (start + count) // _BASE_COUNT + 1
    flat = xp.tile(base, repeats) if repeats > 1 else base
    return flat[start : start + count].reshape(shape).copy()  # an array of its own, aligned


def _poisoned(xp: Any, shape: tuple[int, ...], case: Case) -> Any:
    return xp.full(shape, _POISON_BITS[case.dtype, case.poison], dtype=np.uint16)


def _fill_tokens(xp: Any, view: Any, valid_tokens: np.ndarray, case: Case, seed: int) -> None:
    """Random values in the first valid_tokens[i] tokens of row i of `view` (rows, tokens, h_kv, d_qk) bits."""
    if 0 in view.shape:
        return
    bits = random_bits(xp, case.dtype, view.shape, seed)
    valid = xp.arange(view.shape[1])[None, :] < xp.asarray(valid_tokens)[:, None]
    poison = np.uint16(_POISON_BITS[case.dtype, case.poison])
    view[...] = xp.where(valid[:, :, None, None], bits, poison)


def _cache_view(xp: Any, rows: int, tokens: int, case: Case) -> Any:
    """Poisoned bits (rows, tokens, h_kv, d_qk), laid out in memory as case.cache_layout says."""
    h_kv, d = case.h_kv, case.d_qk
    if case.cache_layout == "interleaved":  # two layers share each page
        return _poisoned(xp, (rows, 2, tokens, h_kv, d), case)[:, 1]
    if case.cache_layout == "offset":  # a slice of a larger pool
        return _poisoned(xp, (rows + 2, tokens, h_kv, d), case)[2:]
    if case.cache_layout == "token_padded":
        return _poisoned(xp, (rows, tokens, h_kv, d + 64), case)[..., :d]
    if case.cache_layout == "heads_first":
        return _poisoned(xp, (rows, h_kv, tokens, d), case).transpose(0, 2, 1, 3)
    return _poisoned(xp, (rows, tokens, h_kv, d), case)


def _contiguous_cache(case: Case, xp: Any) -> Any:
    tokens = max(case.lengths, default=0) + (case.spare_pages and 37)
    view = _cache_view(xp, case.batch, tokens, case)
    _fill_tokens(xp, view, np.asarray(case.lengths), case, 2 * case.seed + 1)
    return view.view(DTYPES[case.dtype])


def _paged_cache(case: Case, xp: Any, rng: np.random.Generator) -> tuple[Any, Any]:
    table, valid_tokens = paging(case, xp, rng)
    view = _cache_view(xp, len(valid_tokens), case.page_size, case)
    _fill_tokens(xp, view, valid_tokens, case, 2 * case.seed + 1)
    return view.view(DTYPES[case.dtype]), table


def paging(case: Any, xp: Any, rng: np.random.Generator) -> tuple[Any, np.ndarray]:
    """Shuffled pages: the block table int32 (batch, width), and how many tokens of each page a request has (pages,).

    case: any with lengths, page_size, spare_pages, table, and unused_entry, which is behind the pages of each request.
    """
    page_counts = [-(-length // case.page_size) for length in case.lengths]
    used = sum(page_counts)
    page_count = used + case.spare_pages
    order = rng.permutation(page_count).astype(np.int32)
    needed = max(page_counts, default=0)
    entry = page_count if case.unused_entry is None else case.unused_entry
    width = needed + (5 if case.table == "wide" else 0)
    stored = np.full((case.batch, width + (3 if case.table == "view" else 0)), entry, np.int32)
    valid_tokens = np.zeros(page_count, np.int64)
    start = 0
    for row, (length, count) in enumerate(zip(case.lengths, page_counts, strict=True)):
        pages = order[start : start + count]
        stored[row, :count] = pages
        valid_tokens[pages] = case.page_size
        if count:
            valid_tokens[pages[-1]] = length - (count - 1) * case.page_size
        start += count
    return xp.asarray(stored)[:, :width], valid_tokens


def guarded(xp: Any, layout: str, shape: tuple[int, int, int, int], dtype: np.dtype) -> Guarded:
    b, s, h, d = shape
    buffer_shape, select = {
        "dense": (shape, lambda x: x),
        "head_view": ((b, s, max(64, h) + _PAD, d), lambda x: x[:, :, 4 : 4 + h]),
        "padded": ((b, s + 1, h, d + _PAD), lambda x: x[:, 1:, :, :d]),
        "swapped": ((s, b, h, d), lambda x: x.transpose(1, 0, 2, 3)),
    }[layout]
    return _filled(Guarded(xp.empty(buffer_shape, np.uint16), select, dtype))


def guarded_lse(xp: Any, layout: str, shape: tuple[int, int, int]) -> Guarded:
    b, h, s = shape
    buffer_shape, select = {
        "dense": (shape, lambda x: x),
        "head_view": ((b, h + 5, s), lambda x: x[:, 2 : 2 + h]),
        "padded": ((b, h, s + 3), lambda x: x[:, :, 1 : 1 + s]),
        "swapped": ((b, s, h), lambda x: x.transpose(0, 2, 1)),
    }[layout]
    return _filled(Guarded(xp.empty(buffer_shape, np.uint32), select, DTYPES["float32"]))


def _filled(guarded: Guarded) -> Guarded:
    guarded.refill()
    return guarded
