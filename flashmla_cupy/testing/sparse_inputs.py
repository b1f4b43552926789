"""Arrays of a sparse decode case, built hostile: every slot that no counting index names, and everything between the
pages, is one poison byte; outputs are pre-filled with NaN inside guard bands. Written over the array namespace.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from flashmla_cupy.kv_format import FORMATS, KVFormat
from flashmla_cupy.testing import inputs
from flashmla_cupy.testing.cases import HEAD_DIM_V
from flashmla_cupy.testing.sparse_cases import INT_MIN, INVALID_VALUES, POISONS, SparseCase, invalid_value

_CODE_BASE_COUNT = 4194301  # prime, as in inputs
_CODE_DEVIATION = {"quantized": 96.0, "odd": 1.0, "spread": 1.0}  # keys come out near 1, of "spread" near 2^9
_Q_GAIN = {"quantized": 1.0, "odd": 1.0, "spread": 2.0**-6}
_ODD_SCALES = (0.75, 1.0039, 1 / 3, 0.1, 1.9999, 1.0)
_SINKS = (-math.inf, -5.0, 0.0, 20.0, math.inf, 3.0, math.nan)
_PADDING_BYTES = 160


@dataclass
class SparseInputs:
    """What one call is given; the optional arguments are None where the case has none."""

    q: Any  # (batch, s_q, h_q, d_qk) bfloat16
    k_cache: Any  # (pages, page_size, 1, bytes_per_token) uint8
    indices: Any  # (batch, s_q, topk) int32
    topk_length: Any  # (batch,) int32 | None
    attn_sink: Any  # (h_q,) float32 | None
    extra_k_cache: Any
    extra_indices: Any
    extra_topk_length: Any
    out: inputs.Guarded  # (batch, s_q, h_q, 512)
    lse: inputs.Guarded  # (batch, h_q, s_q) float32

    def keywords(self) -> dict[str, Any]:
        """The arguments that the call and the reference share, by name."""
        names = ("indices", "topk_length", "attn_sink", "extra_k_cache", "extra_indices", "extra_topk_length")
        return {name: getattr(self, name) for name in names}


def build(case: SparseCase, xp: Any = np) -> SparseInputs:
    """The arrays of `case`, the same bits for every `xp`."""
    cache, indices, lengths = _selection(case, xp, 0, case.topk, case.tokens, case.page_size, case.length)
    extra = (None, None, None)
    if case.extra_topk:
        extra = _selection(
            case, xp, 1, case.extra_topk, case.extra_tokens, case.extra_page_size, case.extra_length
        )
    return SparseInputs(query(case, xp), cache, indices, lengths, sinks(case, xp), *extra, *outputs(case, xp))


def query(case: Any, xp: Any) -> Any:
    """(batch, s_q, h_q, d_qk) bfloat16, laid out as case.q_layout says; moderate scores with keys of case.scales."""
    bits = inputs.random_bits(
        xp, "bfloat16", (case.batch, case.s_q, case.h_q, case.d_qk), 2 * case.seed, case.q_gain * _Q_GAIN[case.scales]
    )
    q = inputs.guarded(xp, case.q_layout, bits.shape, inputs.DTYPES["bfloat16"])
    q.select(q.buffer)[...] = bits
    return q.array


def outputs(case: Any, xp: Any) -> tuple[inputs.Guarded, inputs.Guarded]:
    """out (batch, s_q, h_q, 512) bfloat16 and lse (batch, h_q, s_q) float32."""
    shape = (case.batch, case.s_q, case.h_q, HEAD_DIM_V)
    out = inputs.guarded(xp, case.out_layout, shape, inputs.DTYPES["bfloat16"])
    return out, inputs.guarded_lse(xp, case.out_layout, (case.batch, case.h_q, case.s_q))


def _selection(
    case: SparseCase, xp: Any, which: int, topk: int, tokens: int, page_size: int, length: str
) -> tuple[Any, Any, Any]:
    """Cache, indices and lengths; which: 0 the main one, 1 the extra one."""
    rng = np.random.default_rng((case.seed, which))
    pages = -(-tokens // page_size)
    capacity = pages * page_size
    indices = _indices(case, rng, topk, capacity)
    lengths = _lengths(length, rng, case.batch, topk)
    counts = (indices >= 0) & (indices < capacity)
    if lengths is not None:
        counts &= np.arange(topk) < lengths[:, None, None]
    named = np.zeros(capacity, bool)
    named[indices[counts]] = True
    cache = hostile_cache(case, xp, rng, pages, page_size, named, 2 * case.seed + which)
    return cache, xp.asarray(indices), None if lengths is None else xp.asarray(lengths)


def _indices(case: SparseCase, rng: np.random.Generator, topk: int, capacity: int) -> np.ndarray:
    """int32 (batch, s_q, topk). With invalid ones among them, slot 0 and the last slot are named by none."""
    shape = (case.batch, case.s_q, topk)
    first, last = (1, capacity - 1) if case.invalid != "none" and capacity > 2 else (0, capacity)
    last = max(last, first + 1)  # an empty cache, of which all indices are invalid
    indices = rng.integers(first, last, shape)
    if case.few_slots:
        indices = rng.integers(first, last, 5)[rng.integers(0, 5, shape)]
    values = np.array([invalid_value(name, capacity) for name in INVALID_VALUES])
    wrong = values[rng.integers(0, len(values), shape)]
    if case.invalid_value is not None:
        wrong = np.full(shape, invalid_value(case.invalid_value, capacity))
    place = np.arange(topk)
    at = {
        "none": lambda: np.zeros(shape, bool),
        "random": lambda: rng.random(shape) < 0.3,
        "runs": lambda: rng.random((*shape[:2], topk // 24 + 1)).repeat(24, axis=2)[..., :topk] < 0.5,
        "head": lambda: np.broadcast_to(place < topk // 2, shape),
        "tail": lambda: place >= rng.integers(0, topk + 1, (*shape[:2], 1)),
        "all": lambda: np.ones(shape, bool),
    }[case.invalid]()
    return np.where(at, wrong, indices).astype(np.int32)


def _lengths(kind: str, rng: np.random.Generator, batch: int, topk: int) -> np.ndarray | None:
    if kind == "none":
        return None
    lengths = {
        "zero": lambda: np.zeros(batch),
        "one": lambda: np.ones(batch),
        "random": lambda: rng.choice([0, 1, 63, 64, 65, topk // 2, topk, *rng.integers(0, topk + 1, 5)], batch),
        "negative": lambda: rng.choice([-1, -64, INT_MIN, 0, topk, (topk + 1) // 2], batch),
        "beyond": lambda: topk + rng.choice([0, 1, 64, 1 << 20], batch),
    }[kind]()
    return lengths.astype(np.int32)


def sinks(case: Any, xp: Any) -> Any:
    """(h_q,) float32 as case.sink says, or None. case: any with sink, h_q and seed."""
    if case.sink == "none":
        return None
    values = [_SINKS[(head + case.seed) % len(_SINKS)] for head in range(case.h_q)]
    if case.sink != "mixed":
        values = [float(case.sink)] * case.h_q
    return xp.asarray(np.asarray(values, np.float32))


def hostile_cache(
    case: Any, xp: Any, rng: np.random.Generator, pages: int, page_size: int, named: np.ndarray, seed: int
) -> Any:
    """uint8 (pages, page_size, 1, bytes_per_token), random where `named` (slots,), else poison, also between the pages.

    case: any with layout, cache_layout, scales and poison.
    """
    layout = FORMATS[case.layout]
    page_bytes, token_bytes = layout.page_bytes(page_size), layout.bytes_per_token
    before, stride, offset = {
        "dense": (0, page_bytes, 0),
        "interleaved": (0, 2 * page_bytes, page_bytes),  # two layers share each page
        "offset": (2, page_bytes, 0),  # a slice of a larger pool
        "padded": (0, page_bytes + _PADDING_BYTES, 0),
    }[case.cache_layout]
    poison = np.uint8(POISONS[case.poison])
    buffer = xp.full((before + pages, stride), poison, np.uint8)
    body = buffer[before:, offset : offset + page_size * token_bytes]
    write_tokens(
        body,
        xp.where(xp.asarray(named)[:, None], random_tokens(xp, rng, layout, len(named), case.scales, seed), poison),
        layout,
        page_size,
    )
    as_strided = xp.lib.stride_tricks.as_strided
    return as_strided(body, (pages, page_size, 1, token_bytes), (stride, token_bytes, token_bytes, 1))


def write_tokens(body: Any, tokens: Any, layout: KVFormat, page_size: int) -> None:
    """Puts tokens (slots, codes | scales, unused | RoPE) into pages (pages, page_size * bytes_per_token)."""
    pages = body.shape[0]
    tokens = tokens.reshape(pages, page_size, layout.bytes_per_token)
    if layout.scales_in_row:
        body[...] = tokens.reshape(body.shape)
        return
    rows = body[:, : page_size * layout.row_bytes].reshape(pages, page_size, layout.row_bytes)
    scales = body[:, page_size * layout.row_bytes :].reshape(pages, page_size, layout.scale_bytes)
    codes_end, scales_end = layout.d_nope, layout.d_nope + layout.scale_bytes
    rows[..., :codes_end] = tokens[..., :codes_end]
    rows[..., codes_end:] = tokens[..., scales_end:]
    scales[...] = tokens[..., codes_end:scales_end]


def random_tokens(
    xp: Any, rng: np.random.Generator, layout: KVFormat, count: int, scales: str, seed: int
) -> Any:
    """uint8 (count, codes | scales with what is unused | RoPE), no NaN in it."""
    codes = random_codes(xp, (count, layout.d_nope), _CODE_DEVIATION[scales], seed)
    rope = inputs.random_bits(xp, "bfloat16", (count, layout.d_rope), seed + 7)
    scale_bytes = np.full((count, layout.scale_bytes), 0xFF, np.uint8)
    drawn = _scales(rng, layout, count, scales)
    scale_bytes[:, : layout.tiles * drawn.itemsize] = drawn.view(np.uint8)
    return xp.concatenate([codes, xp.asarray(scale_bytes), rope.view(np.uint8)], axis=1)


def _scales(rng: np.random.Generator, layout: KVFormat, count: int, kind: str) -> np.ndarray:
    """(count, tiles) float32, or uint8 of ue8m0."""
    shape = (count, layout.tiles)
    if layout.scale == "ue8m0":
        exponents = {
            "quantized": lambda: rng.integers(-8, -5, shape),
            "odd": lambda: rng.integers(-3, 2, shape),
            "spread": lambda: rng.permuted(np.tile(np.linspace(-13, 10, layout.tiles).astype(int), (count, 1)), axis=1),
        }[kind]()
        return (exponents + 127).astype(np.uint8)
    values = {
        "quantized": lambda: rng.uniform(0.5, 1.5, shape) / _CODE_DEVIATION["quantized"],
        "odd": lambda: rng.choice(_ODD_SCALES, shape),
        "spread": lambda: rng.permuted(np.tile(2.0 ** np.array([-13, -4, 3, 10]), (count, 1)), axis=1)
        * rng.choice([1.0, 0.75, 1 / 3], shape),
    }[kind]()
    return values.astype(np.float32)


def random_codes(xp: Any, shape: tuple[int, ...], deviation: float, seed: int) -> Any:
    """e4m3 codes uint8 of normal values, deterministic in the arguments and the same for every `xp`; no NaN."""
    count = math.prod(shape)
    base = _code_base(xp, deviation, 0 if xp is np else int(xp.cuda.Device().id))
    start = seed * 7919 % _CODE_BASE_COUNT
    repeats = (start + count) // _CODE_BASE_COUNT + 1
    flat = xp.tile(base, repeats) if repeats > 1 else base
    return flat[start : start + count].reshape(shape).copy()


@functools.lru_cache(maxsize=8)
def _code_base(xp: Any, deviation: float, device: int) -> Any:
    values = np.random.default_rng(1).standard_normal(_CODE_BASE_COUNT, dtype=np.float32) * np.float32(deviation)
    return xp.asarray(np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))
