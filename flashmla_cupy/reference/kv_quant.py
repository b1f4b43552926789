"""The FP8 KV cache in NumPy: what the kernels do, bit for bit. flashmla_cupy/kv_format.py describes the bytes.

Scale of a tile, with amax the largest finite magnitude in it:
    float32        max(amax / 448, 2^-126), the quotient rounded to float32
    power of two   the smallest 2^k with 448 * 2^k >= amax, k >= -126
    amax = 0       1
Code of a value x: x / scale rounded to float32, that rounded to e4m3 (both to nearest, ties to even), magnitudes above
448 saturating to 448. So Inf becomes 448, and NaN the code 0x7F; neither touches the scale or its neighbours.
A code times its scale is rounded once, to the type asked for. RoPE values are bfloat16 as they were given.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from flashmla_cupy.kv_format import E4M3_MAX, E4M3_NAN, MIN_SCALE, KVFormat
from flashmla_cupy.reference._numerics import round_to, widen

_BF16, _E4M3 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)
_E8M0_BIAS = 127


class Parts(NamedTuple):
    """Views of the parts of a cache; writing to them writes the cache."""

    codes: np.ndarray  # (pages, page_size, d_nope) uint8
    scales: np.ndarray  # (pages, page_size, tiles) float32, or uint8 of ue8m0
    rope: np.ndarray  # (pages, page_size, d_rope) bfloat16
    unused: np.ndarray  # (pages, page_size, bytes behind the scales) uint8


def empty_cache(pages: int, page_size: int, layout: KVFormat) -> np.ndarray:
    """A cache of zeros, uint8 (pages, page_size, 1, bytes_per_token), its pages `layout.page_bytes` apart."""
    page_bytes, token_bytes = layout.page_bytes(page_size), layout.bytes_per_token
    buffer = np.zeros((pages, page_bytes), np.uint8)
    return np.lib.stride_tricks.as_strided(buffer, (pages, page_size, 1, token_bytes),
                                           (page_bytes, token_bytes, token_bytes, 1))


def parts_of(cache: np.ndarray, layout: KVFormat) -> Parts:
    """The parts of a uint8 cache (pages, page_size, 1, bytes_per_token) whose tokens lie one behind the other."""
    pages, page_size = cache.shape[:2]
    page_stride = cache.strides[0]

    def part(offset: int, stride: int, count: int, dtype: Any) -> np.ndarray:
        dtype = np.dtype(dtype)
        shape = (pages, page_size, count)
        if 0 in shape:
            return np.empty(shape, dtype)
        page = np.lib.stride_tricks.as_strided(cache, (pages, page_size * layout.bytes_per_token), (page_stride, 1))
        rows = np.lib.stride_tricks.as_strided(page[:, offset:], (pages, page_size, count * dtype.itemsize),
                                               (page_stride, stride, 1))
        return rows.view(dtype)

    scale_dtype = np.dtype(np.float32 if layout.scale == "float32" else np.uint8)
    scales, scales_end = layout.scale_offset(page_size), layout.tiles * scale_dtype.itemsize
    return Parts(
        part(0, layout.row_bytes, layout.d_nope, np.uint8),
        part(scales, layout.scale_stride, layout.tiles, scale_dtype),
        part(layout.rope_offset, layout.row_bytes, layout.d_rope, _BF16),
        part(scales + scales_end, layout.scale_stride, layout.scale_bytes - scales_end, np.uint8))


def tile_scales(values: np.ndarray, *, power_of_two: bool) -> np.ndarray:
    """Scales float32 (...) of tiles (..., tile) float32."""
    magnitude = np.abs(values)
    amax = np.where(np.isfinite(magnitude), magnitude, np.float32(0)).max(axis=-1)
    if power_of_two:
        mantissa, exponent = np.frexp(amax)  # amax = mantissa * 2^exponent, and 448 = 0.875 * 2^9
        scale = np.ldexp(np.float32(1), np.maximum(exponent - 9 + (mantissa > 0.875), -126))
    else:
        scale = np.maximum(amax / np.float32(E4M3_MAX), np.float32(MIN_SCALE))
    return np.where(amax == 0, np.float32(1), scale).astype(np.float32)


def encode_e4m3(values: np.ndarray) -> np.ndarray:
    """e4m3 codes uint8 of float32 values: to nearest, ties to even, saturating; NaN of either sign is 0x7F."""
    limited = np.clip(values, np.float32(-E4M3_MAX), np.float32(E4M3_MAX))  # NaN passes
    codes = limited.astype(_E4M3).view(np.uint8)
    return np.where(np.isnan(values), np.uint8(E4M3_NAN), codes)


def decode_e4m3(codes: np.ndarray) -> np.ndarray:
    """float32 values of e4m3 codes."""
    return codes.view(_E4M3).astype(np.float32)


def scale_values(scales: np.ndarray) -> np.ndarray:
    """float32 scales of what a cache holds: themselves, or 2^(byte - 127) for ue8m0 (byte 255: NaN)."""
    if scales.dtype == np.float32:
        return scales
    powers = np.ldexp(np.float32(1), scales.astype(np.int32) - _E8M0_BIAS)
    return np.where(scales == 255, np.float32(np.nan), powers).astype(np.float32)


def quantize(kv: np.ndarray, layout: KVFormat, *, power_of_two_scales: bool = False,
             out: np.ndarray | None = None) -> np.ndarray:
    """A cache uint8 (pages, page_size, 1, bytes_per_token) of `kv` (pages, page_size, 1, d_qk), any float type.

    Writes into `out` if given, and there only bytes that belong to a token (of D512, also its unused scale byte, 0).
    Scales of D512 are powers of two in any case.
    """
    pages, page_size, h_kv, d_qk = kv.shape
    if h_kv != 1 or d_qk != layout.d_qk:
        raise ValueError(f"kv: got shape {kv.shape}, expected (pages, page_size, 1, {layout.d_qk})")
    cache = empty_cache(pages, page_size, layout) if out is None else out
    if cache.size:
        write_tokens(parts_of(cache, layout), kv[:, :, 0], layout, power_of_two_scales)
    return cache


def write_tokens(parts: Parts, kv: np.ndarray, layout: KVFormat, power_of_two_scales: bool) -> None:
    """Quantizes kv (pages, page_size, d_qk) into views of the same first two axes."""
    tiles = kv[..., :layout.d_nope].astype(np.float32).reshape(*kv.shape[:-1], layout.tiles, layout.tile)
    power_of_two = power_of_two_scales or layout.scale == "ue8m0"
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        scales = tile_scales(tiles, power_of_two=power_of_two)
        codes = encode_e4m3(tiles / scales[..., None])
        rope = kv[..., layout.d_nope:].astype(_BF16)
    parts.codes[...] = codes.reshape(parts.codes.shape)
    parts.rope[...] = rope
    parts.unused[...] = 0
    if layout.scale == "float32":
        parts.scales[...] = scales
    else:
        parts.scales[...] = (np.frexp(scales)[1] - 1 + _E8M0_BIAS).astype(np.uint8)


def dequantize(cache: np.ndarray, layout: KVFormat, *, dtype: Any = np.float32) -> np.ndarray:
    """The values (pages, page_size, 1, d_qk) of a uint8 cache as float32 or bfloat16 (float64: the exact products)."""
    dtype = np.dtype(dtype)
    parts = parts_of(cache, layout)
    pages, page_size = cache.shape[:2]
    out = np.empty((pages, page_size, 1, layout.d_qk), dtype)
    tiles = decode_e4m3(parts.codes).reshape(pages, page_size, layout.tiles, layout.tile)
    with np.errstate(invalid="ignore", over="ignore", under="ignore"):
        exact = tiles.astype(np.float64) * scale_values(parts.scales)[..., None]  # 4 + 24 significant bits
        out[:, :, 0, :layout.d_nope] = round_to(exact, dtype, xp=np).reshape(pages, page_size, layout.d_nope)
        out[:, :, 0, layout.d_nope:] = widen(parts.rope)
    return out


def token_indices(block_table: np.ndarray, positions: np.ndarray, page_size: int) -> np.ndarray:
    """Cache indices int32 of `positions` (batch, ...) in their requests; see ops.kv_quant.token_indices."""
    batch, width = block_table.shape
    if width == 0 or positions.size == 0:
        return np.full(positions.shape, -1, np.int32)
    at = positions.reshape(batch, -1).astype(np.int64)
    entry = at // page_size
    inside = (at >= 0) & (entry < width)
    page = np.take_along_axis(block_table.astype(np.int64), np.where(inside, entry, 0), axis=1)
    index = page * page_size + at % page_size
    valid = inside & (page >= 0) & (index < 2**31)
    return np.where(valid, index, -1).astype(np.int32).reshape(positions.shape)
