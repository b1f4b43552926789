"""What `validate` runs for the FP8 cache: quantize, dequantize and token indices against their NumPy twins bit for bit.

Without a GPU the twins themselves are checked: codes against the nearest of all 256, values byte by byte.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np

import flashmla_cupy
from flashmla_cupy.kv_format import E4M3_MAX, FORMATS, KVFormat
from flashmla_cupy.reference import kv_quant as reference
from flashmla_cupy.testing import plain_sparse
from flashmla_cupy.testing.compare import Errors
from flashmla_cupy.testing.machine import Machine

DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_GUARD = 0xA5
_PLAIN_TOKENS = 200  # of the check without a GPU
_BIG = {"smoke": 700, "corner": 5_000, "full": 70_000}  # tokens


def collect(suite: str, machine: Machine) -> list[tuple[str, Callable[[Machine], Errors]]]:
    """(name, check) of a suite that this machine can run."""
    if suite not in _BIG:
        raise ValueError(f"suite: got {suite!r}, expected one of {', '.join(_BIG)}")
    sizes = [(64, 64 * 3), (48, 101)] if suite == "smoke" else [(64, 64 * 37), (1, 9), (64, 4095), (7, 700), (256, 1)]
    sizes = [(page, tokens) for page, tokens in (*sizes, (64, _BIG[suite])) if machine.gpu or tokens <= _PLAIN_TOKENS]
    rows: list[tuple[str, Callable[[Machine], Errors]]] = []
    for name, layout in FORMATS.items():
        for dtype in DTYPES:
            for page, tokens in sizes:
                for kind in ("dense", "interleaved"):
                    for power_of_two in (False, True):
                        label = f"{name} {dtype} {tokens} tokens page{page} {kind}{' 2^k' * power_of_two}"
                        rows.append((f"quantize {label}", partial(
                            quantize, layout, dtype, page, tokens, kind, power_of_two)))
                    rows.append((f"dequantize {name} {dtype} {tokens} tokens page{page} {kind}", partial(
                        dequantize, layout, dtype, page, tokens, kind)))
            rows.append((f"round trip {name} {dtype}", partial(round_trip, layout, dtype)))
    shapes = [(1, 1), (3, 64), (5, 2, 133)] + ([(128, 2, 2048), (70000, 3)] if machine.gpu else [])
    rows += [(f"token_indices {shape} page{page}", partial(token_indices, shape, page))
             for shape in shapes for page in (1, 48, 64)]
    return rows


def hostile_kv(tokens: int, layout: KVFormat, dtype: str, seed: int) -> np.ndarray:
    """(tokens, d_qk): all magnitudes, zero and tiny tiles, -0, ties, exactly 448 scales, Inf and NaN of both signs."""
    with np.errstate(over="ignore"):
        return _hostile_float32(tokens, layout, seed).astype(DTYPES[dtype])


@functools.lru_cache(maxsize=8)  # of a layout: 70,000 tokens take seconds, and eight checks want the same
def _hostile_float32(tokens: int, layout: KVFormat, seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    kv, tile = rng.standard_normal((tokens, layout.d_qk)), layout.tile
    groups = -(-layout.d_qk // tile)
    exponents = np.where(rng.random((tokens, groups)) < 0.5, 0, rng.integers(-140, 127, (tokens, groups)))
    kv = np.ldexp(kv, exponents.repeat(tile, axis=1)[:, : layout.d_qk])
    kv[rng.random(kv.shape) < 0.02] = 0
    kv[rng.random(kv.shape) < 0.02] = -0.0
    ties = rng.random(kv.shape) < 0.2  # multiples of a power of two, half way between codes
    kv[ties] = np.ldexp(rng.integers(-35, 36, kv.shape), rng.integers(-8, 4, kv.shape))[ties]
    with np.errstate(over="ignore"):
        kv = kv.astype(np.float32)
    kv[::7, :tile] = 0
    kv[1::7, :tile] = 1e-30
    kv[2::7, tile : 2 * tile] = np.ldexp(np.float32(E4M3_MAX), -9)
    for special in (np.nan, -np.nan, np.inf, -np.inf):
        kv[rng.random(kv.shape) < 0.0005] = special
    kv[5:6, tile : 2 * tile], kv[6:7, tile : 2 * tile] = np.inf, np.nan
    kv.flags.writeable = False
    return kv


def quantize(
    layout: KVFormat, dtype: str, page_size: int, tokens: int, kind: str, power_of_two: bool, machine: Machine
) -> Errors:
    """Every byte of every token, and nothing between the pages or behind the last token."""
    kv = hostile_kv(tokens, layout, dtype, seed=tokens)
    buffer, view = _cache(machine.xp, layout, -(-tokens // page_size), page_size, kind)
    options = dict(layout=layout.name, page_size=page_size, power_of_two_scales=power_of_two)
    returned = flashmla_cupy.quantize_kv_cache(machine.xp.asarray(kv), out=view, **options)
    machine.wait()
    if returned is not view:
        return Errors(message="out: another array was returned")
    got = _on_host(view, layout)
    expected = reference.empty_cache(*view.shape[:2], layout)
    expected[...] = _GUARD
    flashmla_cupy.quantize_kv_cache(kv, out=expected, **options)
    message = _same_caches(got, expected, layout)
    if message is None and not machine.gpu:
        message = _right_codes(kv, reference.parts_of(got, layout), layout, power_of_two)
    view[...] = _GUARD
    if message is None and not bool((buffer == _GUARD).all()):
        message = "bytes outside the tokens were written"
    return Errors(message=message)


def dequantize(layout: KVFormat, dtype: str, page_size: int, tokens: int, kind: str, machine: Machine) -> Errors:
    """Any codes and any scales, subnormal, Inf and NaN too: each product rounded once."""
    xp, pages = machine.xp, -(-tokens // page_size)
    rng = np.random.default_rng(tokens + 1)
    host = reference.empty_cache(pages, page_size, layout)
    host[...] = rng.integers(0, 256, host.shape)
    parts = reference.parts_of(host, layout)
    if layout.scale == "float32":
        parts.scales[::2] = np.exp2(rng.uniform(-20, 20, parts.scales[::2].shape))
        half = parts.scales[1::2].view(np.uint32)
        half[...] = half & 0xFFFF0000 | 0x8000  # products half way between two bfloat16
    _, view = _cache(xp, layout, pages, page_size, kind)
    view[...] = xp.asarray(np.ascontiguousarray(host))
    out = xp.full((pages, page_size, 3, layout.d_qk), np.nan, np.float32).astype(DTYPES[dtype])
    flashmla_cupy.dequantize_kv_cache(view, layout=layout.name, dtype=dtype, out=out[:, :, 1:2])
    fresh = flashmla_cupy.dequantize_kv_cache(view, layout=layout.name, dtype=dtype)
    machine.wait()
    expected = reference.dequantize(host, layout, dtype=DTYPES[dtype])
    for label, got in (("out=", out[:, :, 1:2]), ("new array", fresh)):
        message = _same_values(_numpy(got), expected)
        if message is not None:
            return Errors(message=f"{label}: {message}")
    if not bool(xp.isnan(out[:, :, ::2].astype(np.float32)).all()):
        return Errors(message="out: elements outside the view were written")
    if not machine.gpu:
        with np.errstate(over="ignore", invalid="ignore"):
            for slot in range(0, min(tokens, 40)):
                plain = plain_sparse.token(host, slot, layout.d_qk).astype(np.float32).astype(DTYPES[dtype])
                message = _near_values(expected[slot // page_size, slot % page_size, 0], plain)
                if message is not None:
                    return Errors(message=f"slot {slot}: {message}")
    return Errors()


def round_trip(layout: KVFormat, dtype: str, machine: Machine) -> Errors:
    """Values come back within half a step of e4m3 times their scale, RoPE as it was."""
    rng = np.random.default_rng(9)
    kv = np.ldexp(rng.standard_normal((4, 64, 1, layout.d_qk)), rng.integers(-20, 20, (4, 64, 1, 1)))
    kv = kv.astype(np.float32).astype(DTYPES[dtype])
    cache = flashmla_cupy.quantize_kv_cache(machine.xp.asarray(kv), layout=layout.name)
    back = _numpy(flashmla_cupy.dequantize_kv_cache(cache, layout=layout.name, dtype="float32"))
    kv = kv.astype(np.float64)
    scales = reference.scale_values(reference.parts_of(_on_host(cache, layout), layout).scales).astype(np.float64)
    scales = scales.repeat(layout.tile, axis=-1)[:, :, None]
    values, got = kv[..., : layout.d_nope], back[..., : layout.d_nope]
    # Half a step: 2^-4 of a normal code, 2^-10 of the scale for a subnormal one; 1e-6 for the rounded quotient.
    allowed = np.maximum(abs(values) * 2.0**-4, scales * 2.0**-10) * (1 + 1e-6)
    worst = float((abs(got - values) / allowed).max())
    rope = kv[..., layout.d_nope :].astype(np.float32).astype(DTYPES["bfloat16"]).astype(np.float32)
    if not worst <= 1:
        return Errors(out=worst, message=f"error {worst:.3g} x half a step of e4m3")
    if not np.array_equal(back[..., layout.d_nope :], rope):
        return Errors(out=worst, message="RoPE values changed")
    return Errors(out=worst)


def token_indices(shape: tuple[int, ...], page_size: int, machine: Machine) -> Errors:
    """page * page_size + offset, -1 for what is not in the block table; wide tables, strided rows, int64 results."""
    rng = np.random.default_rng(len(shape))
    table = rng.integers(-1, 1 << 20, (shape[0], 42)).astype(np.int32)
    table[:, 36] = 2**31 - 1  # its indices do not fit into int32
    positions = rng.integers(-3, 40 * page_size, shape).astype(np.int32)
    positions.reshape(-1)[:1] = 2**31 - 1
    got = flashmla_cupy.token_indices(machine.xp.asarray(table)[:, :37], machine.xp.asarray(positions), page_size)
    machine.wait()
    got = _numpy(got)
    if got.dtype != np.int32 or got.shape != positions.shape:
        return Errors(message=f"got {got.dtype} {got.shape}, expected int32 {positions.shape}")
    if machine.gpu:
        expected = reference.token_indices(table[:, :37], positions, page_size)
    else:
        rows = zip(table[:, :37], positions.reshape(shape[0], -1).tolist(), strict=True)
        expected = np.array([_plain_index(row, at, page_size) for row, request in rows for at in request])
        expected = expected.reshape(shape)
    wrong = np.argwhere(got != expected)
    if len(wrong):
        place = tuple(wrong[0].tolist())
        return Errors(message=f"differs at {place}: got {got[place]}, expected {expected[place]}")
    return Errors()


def _plain_index(pages: np.ndarray, position: int, page_size: int) -> int:
    if position < 0 or position // page_size >= len(pages) or pages[position // page_size] < 0:
        return -1
    index = int(pages[position // page_size]) * page_size + position % page_size
    return index if index < 2**31 else -1


# ---- details


def _cache(xp: Any, layout: KVFormat, pages: int, page_size: int, kind: str) -> tuple[Any, Any]:
    """A buffer of guard bytes and the cache in it; "interleaved": each page is followed by another layer's."""
    page_bytes, token_bytes = layout.page_bytes(page_size), layout.bytes_per_token
    before = 1280 if kind == "interleaved" else 0
    stride = before + page_bytes * (2 if kind == "interleaved" else 1)
    stride = -(-stride // 16) * 16
    buffer = xp.full((pages, stride), _GUARD, np.uint8)
    view = xp.lib.stride_tricks.as_strided(
        buffer[:, before:], (pages, page_size, 1, token_bytes), (stride, token_bytes, token_bytes, 1)
    )
    return buffer, view


def _numpy(array: Any) -> np.ndarray:
    return array.get() if hasattr(array, "get") else array


def _on_host(cache: Any, layout: KVFormat) -> np.ndarray:
    host = reference.empty_cache(*cache.shape[:2], layout)
    host[...] = _numpy(cache)
    return host


def _same_caches(got: np.ndarray, expected: np.ndarray, layout: KVFormat) -> str | None:
    """None, or the first part and place at which two caches differ. A NaN of RoPE may have any payload."""
    got_parts, expected_parts = reference.parts_of(got, layout), reference.parts_of(expected, layout)
    for label, a, b in zip(got_parts._fields, got_parts, expected_parts, strict=True):
        if label == "rope":
            message = _same_values(a.copy(), b.copy())
        else:
            a, b = (np.ascontiguousarray(x).view(np.uint8) for x in (a, b))
            wrong = np.argwhere(a != b)
            message = f"byte {wrong[0].tolist()}: got {a[tuple(wrong[0])]}, expected {b[tuple(wrong[0])]}" if len(
                wrong) else None
        if message is not None:
            return f"{label}: {message}"
    return None


def _same_values(got: np.ndarray, expected: np.ndarray) -> str | None:
    """Equal bits; a NaN may have any payload."""
    bits = np.uint16 if expected.dtype.itemsize == 2 else np.uint32
    got, nan = np.ascontiguousarray(got), np.isnan(expected.astype(np.float32))
    wrong = np.isnan(got.astype(np.float32)) != nan
    wrong |= ~nan & (got.view(bits) != expected.view(bits))
    return _first(wrong, got, expected)


def _near_values(got: np.ndarray, expected: np.ndarray) -> str | None:
    """Equal up to one rounding (`expected` may have been rounded twice)."""
    a, b = got.astype(np.float64), expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        step = 2.0**-7 if expected.dtype.itemsize == 2 else 2.0**-22
        near = (a == b) | (np.isnan(a) & np.isnan(b)) | (abs(a - b) <= step * abs(b))
    return _first(~near, got, expected)


def _first(wrong: np.ndarray, got: np.ndarray, expected: np.ndarray) -> str | None:
    places = np.argwhere(wrong)
    if not len(places):
        return None
    place = tuple(places[0].tolist())
    return f"{len(places)} values differ, first at {place}: got {got[place]}, expected {expected[place]}"


def _right_codes(kv: np.ndarray, parts: Any, layout: KVFormat, power_of_two: bool) -> str | None:
    """Scales by their definition, and each code the nearest of all, an even one of two that are equally near."""
    tokens, tiles = len(kv), layout.tiles
    values = kv[:, : layout.d_nope].astype(np.float32).reshape(tokens, tiles, layout.tile)
    scales = reference.scale_values(parts.scales).reshape(-1, tiles)[:tokens]
    codes = parts.codes.reshape(-1, tiles, layout.tile)[:tokens]
    numbers = np.array(plain_sparse.E4M3[:127])  # 0 to 448, ascending
    with np.errstate(all="ignore"):
        for token in range(tokens):
            for tile in range(tiles):
                row = values[token, tile]
                amax = max((float(abs(x)) for x in row if np.isfinite(x)), default=0.0)
                scale = max(np.float32(amax) / np.float32(448), np.float32(2.0**-126)) if amax else 1.0
                if amax and (power_of_two or layout.scale == "ue8m0"):
                    scale = 2.0 ** next(k for k in range(-126, 128) if 448 * 2.0**k >= amax)
                if float(scales[token, tile]) != float(scale):
                    return f"scale {(token, tile)}: got {scales[token, tile]!r}, expected {scale!r}"
                quotient = (row / np.float32(scale)).astype(np.float64)
                far = abs(abs(quotient)[:, None] - numbers)
                nearest = far.argmin(axis=1)
                upper = np.minimum(nearest + 1, 126)
                tie = (upper > nearest) & (far[np.arange(len(row)), upper] == far.min(axis=1)) & (nearest % 2 == 1)
                nearest = np.where(tie, upper, nearest)
                nearest = np.where(np.isinf(quotient), 126, nearest) | np.where(np.signbit(quotient), 0x80, 0)
                nearest = np.where(np.isnan(quotient), 0x7F, nearest)
                if (nearest != codes[token, tile]).any():
                    at = int((nearest != codes[token, tile]).argmax())
                    return f"code {(token, tile, at)}: got {codes[token, tile, at]}, expected {nearest[at]}"
    return None
