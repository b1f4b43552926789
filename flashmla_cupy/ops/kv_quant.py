"""The FP8 KV cache: writing it, reading it back, and finding tokens in it. docs/kernels/kv_quant.md has the bytes."""

from __future__ import annotations

import functools
import math
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from flashmla_cupy import backends
from flashmla_cupy.kv_format import FORMATS, KVFormat
from flashmla_cupy.runtime import params as kernel_params

from . import _checks, _device, _overlap
from ._select import Problem

_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float32": np.dtype(np.float32)}
_UINT8 = np.dtype(np.uint8)
_TOKENS_PER_BLOCK, _INDICES_PER_BLOCK = 8, 256
_INT32_MAX = 2**31 - 1


def quantize_kv_cache(kv: Any, *, layout: str = "v32", page_size: int | None = None, out: Any = None,
                      power_of_two_scales: bool = False) -> Any:
    """An FP8 cache of `kv`.

    Args:
        kv: bfloat16 or float32, either pages (pages, page_size, 1, d_qk), or tokens (tokens, d_qk) or
            (tokens, 1, d_qk), which fill one page after the other. d_qk is 576 for "v32" and 512 for "d512".
        layout: "v32" or "d512", see flashmla_cupy.kv_format.
        page_size: of the cache; required for tokens, and for pages nothing else than theirs.
        out: the cache to write, as returned; pages may lie any multiple of 16 bytes apart from their own size on. Slots
            behind the last token are left as they are.
        power_of_two_scales: also for "v32"; the scales of "d512" are powers of two in any case.

    Returns:
        uint8 (pages, page_size, 1, bytes_per_token), its pages layout.page_bytes(page_size) apart; slots behind the
        last token are zero. On the device of kv and CuPy's current stream there, or NumPy for NumPy arrays.

    A tile (128 values of "v32", 64 of "d512") has the scale amax / 448 rounded to float32, at least 2^-126, or the
    smallest power of two that is not below amax / 448; amax is the largest finite magnitude, and a tile of zeros has
    the scale 1. A value becomes the e4m3 number nearest to value / scale (ties to even), at most 448 in magnitude: Inf
    becomes 448 * scale, NaN becomes NaN, and neither touches another value.

    Raises:
        TypeError, ValueError: a wrong argument. UnsupportedError: no kernel for the device.
    """
    layout = cache_layout(layout)
    power_of_two_scales = _checks.check_bool("power_of_two_scales", power_of_two_scales)
    on_host = backends.backend_of("kv", kv) == "numpy"
    convert = backends.as_host if on_host else backends.as_device
    kv = convert("kv", kv)
    if kv.dtype not in _DTYPES.values():
        raise TypeError(f"kv: got dtype {kv.dtype}, expected {' or '.join(_DTYPES)}")
    kv, tokens, pages, page_size = _as_tokens(kv, layout, page_size)
    if out is not None:
        out = cache_bytes("out", convert("out", out))
        check_cache("out", out, layout)
        _checks.check_shape("out", out, (pages, page_size, 1, layout.bytes_per_token),
                            "(pages, page_size, 1, bytes_per_token)")
        _checks.check_writable("out", out)
        _overlap.check({"kv": kv, "out": out})
    if on_host:
        return _quantize_on_host(kv, layout, tokens, pages, page_size, power_of_two_scales, out)
    _check_device_arrays(kv.data.device_id, layout, kv=kv, out=out)
    with _device.on_device(kv.data.device_id):
        kernel = _device.get_kernel(Problem("kv_quant.quantize", kv.dtype.name, layout.d_qk), kv.data.device_id)
        stream_ptr = _device.current_stream_ptr()
        if out is None:
            out = _empty_cache(pages, page_size, layout, clear=tokens < pages * page_size)
        with _device.temporaries(stream_ptr):
            if not _device.loads_16_bytes(kv):
                kv = _device.contiguous(kv)
            _launch(kernel, kv, out, layout, tokens, page_size, power_of_two_scales, stream_ptr)
            del kv  # a temporary goes back inside the block
    return out


def dequantize_kv_cache(cache: Any, *, layout: str = "v32", dtype: Any = "bfloat16", out: Any = None) -> Any:
    """The values (pages, page_size, 1, d_qk) of an FP8 cache, each code times its scale rounded once to `dtype`.

    Args:
        cache: uint8 (or int8, float8_e4m3fn) (pages, page_size, 1, bytes_per_token) as quantize_kv_cache returns it;
            pages may lie any multiple of 16 bytes apart from their own size on.
        layout: "v32" or "d512".
        dtype: "bfloat16" or "float32".
        out: an array of that shape and type to write, any strides.

    Returns:
        out, or a new array on the device of cache and CuPy's current stream there; NumPy for NumPy arrays.

    Raises:
        TypeError, ValueError: a wrong argument. UnsupportedError: no kernel for the device.
    """
    layout = cache_layout(layout)
    dtype = _float_dtype(dtype)
    on_host = backends.backend_of("cache", cache) == "numpy"
    convert = backends.as_host if on_host else backends.as_device
    cache = cache_bytes("cache", convert("cache", cache))
    check_cache("cache", cache, layout)
    pages, page_size = map(int, cache.shape[:2])
    shape = (pages, page_size, 1, layout.d_qk)
    _check_token_count("cache", pages * page_size)
    if out is not None:
        out = convert("out", out)
        _checks.check_shape("out", out, shape, "(pages, page_size, 1, d_qk)")
        _checks.check_dtype("out", out, dtype)
        _checks.check_writable("out", out)
        _overlap.check({"cache": cache, "out": out})
    if on_host:
        from flashmla_cupy.reference import kv_quant as reference

        values = reference.dequantize(cache, layout, dtype=dtype)
        if out is None:
            return values
        out[...] = values
        return out
    _check_device_arrays(cache.data.device_id, layout, cache=cache, out=out)
    with _device.on_device(cache.data.device_id):
        kernel = _device.get_kernel(Problem("kv_quant.dequantize", dtype.name, layout.d_qk), cache.data.device_id)
        stream_ptr = _device.current_stream_ptr()
        if out is None:
            out = cupy.empty(shape, dtype)
        with _device.temporaries(stream_ptr):
            target = out if _device.loads_16_bytes(out) else cupy.empty(shape, dtype)
            _launch(kernel, target, cache, layout, pages * page_size, page_size, False, stream_ptr)
            if target is not out:
                _device.assign(out, target)
            del target
    return out


def token_indices(block_table: Any, positions: Any, page_size: int) -> Any:
    """Where tokens of requests lie in a paged cache: page * page_size + offset, as the sparse decode takes them.

    Args:
        block_table: (batch, width) integers, the pages of each request in order.
        positions: (batch, ...) integers, token positions in the request of their row.
        page_size: tokens of a page.

    Returns:
        int32 of the shape of positions; -1 where the position is negative or beyond the block table, where its page is
        negative, and where int32 does not hold the index. A CuPy array if either argument is on the GPU, on that device
        and CuPy's current stream there, without a host synchronisation.

    Raises:
        TypeError, ValueError: a wrong argument. UnsupportedError: no kernel for the device.
    """
    block_table = backends.as_integers("block_table", block_table)
    positions = backends.as_integers("positions", positions)
    page_size = _checks.check_int("page_size", page_size, 1)
    _checks.check_ndim("block_table", block_table, 2, "(batch, pages of the longest request)")
    batch = int(block_table.shape[0])
    if positions.ndim < 1 or int(positions.shape[0]) != batch:
        raise ValueError(f"positions: got shape {tuple(positions.shape)}, expected ({batch}, ...), the batch of "
                         "block_table first")
    arrays = {"block_table": block_table, "positions": positions}
    on_device = [x for x in arrays.values() if not isinstance(x, np.ndarray)]
    if not on_device:
        from flashmla_cupy.reference import kv_quant as reference

        return reference.token_indices(block_table, positions, page_size)
    if positions.size > _INT32_MAX:
        raise ValueError(f"positions: got {positions.size} positions, expected at most {_INT32_MAX}")
    device_id = on_device[0].data.device_id
    _checks.check_same_device(device_id, **arrays)
    _checks.check_element_alignment(**arrays)
    with _device.on_device(device_id):
        kernel = _device.get_kernel(Problem("kv_quant.token_indices"), device_id)
        stream_ptr = _device.current_stream_ptr()
        indices = cupy.empty(positions.shape, np.int32)
        with _device.temporaries(stream_ptr):
            _launch_token_indices(kernel, arrays, indices, page_size, stream_ptr)
    return indices


# ---- what other operations on an FP8 cache check too ----
def cache_layout(layout: Any) -> KVFormat:
    """The format called "v32" or "d512"."""
    if isinstance(layout, KVFormat):
        return layout
    if not isinstance(layout, str):
        raise TypeError(f"layout: got {backends.describe(layout)}, expected {_either(FORMATS)}")
    if layout not in FORMATS:
        raise ValueError(f"layout: got {layout!r}, expected {_either(FORMATS)}")
    return FORMATS[layout]


def cache_bytes(name: str, cache: Any) -> Any:
    """The uint8 view of a cache."""
    if cache.dtype not in _checks.FP8_CACHE_DTYPES:
        raise TypeError(f"{name}: got dtype {cache.dtype}, expected uint8 (or int8, float8_e4m3fn)")
    return cache if cache.dtype == _UINT8 else cache.view(_UINT8)


def check_cache(name: str, cache: Any, layout: KVFormat) -> None:
    """Shape and strides of a uint8 cache: the tokens of a page one behind the other, pages at least their size
    apart."""
    _checks.check_ndim(name, cache, 4, "(pages, page_size, 1, bytes_per_token)")
    pages, page_size, h_kv, got = map(int, cache.shape)
    if got != layout.bytes_per_token:
        scales = f"{layout.tiles} {layout.scale} scales in {layout.scale_bytes} bytes"
        raise ValueError(f"{name}: got {got} bytes per token, expected {layout.bytes_per_token} for layout "
                         f"{layout.name} ({layout.d_nope} e4m3, {scales}, {layout.d_rope} bfloat16)")
    if h_kv != 1:
        raise ValueError(f"{name}: got {h_kv} heads, expected 1")
    page, token, _, byte = cache.strides
    token_bytes = layout.bytes_per_token
    if cache.size == 0:
        return
    if byte != 1 or (page_size > 1 and token != token_bytes):
        raise ValueError(f"{name}: got strides {cache.strides}, expected the tokens of a page one behind the other, "
                         f"{token_bytes} bytes apart")
    if pages > 1 and page < page_size * token_bytes:
        raise ValueError(f"{name}: got a page stride of {page} bytes, expected at least {page_size * token_bytes}, the "
                         "bytes of a page")


# ---- details ----
def _either(names: Any) -> str:
    return " or ".join(map(repr, names))


def _float_dtype(dtype: Any) -> np.dtype:
    try:
        found = _DTYPES[dtype] if isinstance(dtype, str) and dtype in _DTYPES else np.dtype(dtype)
    except TypeError:
        found = None
    if found not in _DTYPES.values():
        raise TypeError(f"dtype: got {dtype!r}, expected {_either(_DTYPES)}")
    return found


def _check_token_count(name: str, tokens: int) -> None:
    if tokens > _INT32_MAX:
        raise ValueError(f"{name}: got {tokens} tokens, expected at most {_INT32_MAX}")


def _as_tokens(kv: Any, layout: KVFormat, page_size: Any) -> tuple[Any, int, int, int]:
    """kv as (pages, page_size, d_qk) or (tokens, d_qk); then tokens, pages and page_size of the cache."""
    shape = tuple(map(int, kv.shape))
    if len(shape) not in (2, 3, 4):
        raise ValueError(f"kv: got shape {shape}, expected (pages, page_size, 1, d_qk) or (tokens, d_qk)")
    if len(shape) > 2 and shape[-2] != 1:
        raise ValueError(f"kv: got {shape[-2]} heads, expected 1")
    if shape[-1] != layout.d_qk:
        raise ValueError(f"kv: got head dimension {shape[-1]}, expected {layout.d_qk} for layout {layout.name}")
    if page_size is not None:
        page_size = _checks.check_int("page_size", page_size, 1)
    if len(shape) == 4:
        if page_size not in (None, shape[1]):
            raise ValueError(f"page_size: got {page_size}, expected {shape[1]}, the page size of kv (or None)")
        _check_token_count("kv", shape[0] * shape[1])
        return kv[:, :, 0], shape[0] * shape[1], shape[0], shape[1]
    if page_size is None:
        raise TypeError("page_size: got None, expected the tokens of a page, as kv is not in pages")
    pages = -(-shape[0] // page_size)
    _check_token_count("kv", pages * page_size)
    return kv if len(shape) == 2 else kv[:, 0], shape[0], pages, page_size


def _quantize_on_host(kv: np.ndarray, layout: KVFormat, tokens: int, pages: int, page_size: int, power_of_two: bool,
                      out: np.ndarray | None) -> np.ndarray:
    from flashmla_cupy.reference import kv_quant as reference

    cache = reference.empty_cache(pages, page_size, layout) if out is None else out
    if tokens == 0:
        return cache
    parts = reference.parts_of(cache, layout)
    if kv.ndim == 3:
        reference.write_tokens(parts, kv, layout, power_of_two)
        return cache
    whole = tokens // page_size
    for first, count, length in ((0, whole, page_size), (whole, 1, tokens - whole * page_size)):
        if count and length:
            views = reference.Parts(*(part[first:first + count, :length] for part in parts))
            some = kv[first * page_size:first * page_size + count * length].reshape(count, length, layout.d_qk)
            reference.write_tokens(views, some, layout, power_of_two)
    return cache


def _check_device_arrays(device_id: int, layout: KVFormat, **arrays: Any) -> None:
    """One device, natural alignment, and for caches 16-byte rows."""
    _checks.check_element_alignment(**arrays)
    for name, x in arrays.items():
        if x is None:
            continue
        if x.data.device_id != device_id:
            raise ValueError(f"{name}: got an array on device {x.data.device_id}, expected device {device_id} as "
                             f"{next(iter(arrays))}")
        if x.dtype == _UINT8 and x.size and (x.data.ptr % 16 or (x.shape[0] > 1 and x.strides[0] % 16)):
            raise ValueError(f"{name}: got address {x.data.ptr:#x} and a page stride of {x.strides[0]} bytes, expected "
                             "multiples of 16")


def _empty_cache(pages: int, page_size: int, layout: KVFormat, clear: bool) -> cupy.ndarray:
    page_bytes, token_bytes = layout.page_bytes(page_size), layout.bytes_per_token
    buffer = cupy.empty(pages * page_bytes, np.uint8)
    if clear:
        _device.assign(buffer, 0)
    return cupy.ndarray((pages, page_size, 1, token_bytes), np.uint8, buffer.data,
                        (page_bytes, token_bytes, token_bytes, 1))


def _launch(kernel, kv, cache, layout: KVFormat, tokens: int, page_size: int, power_of_two: bool, stream_ptr: int):
    """kv: (pages, page_size, [1,] d_qk) or (tokens, d_qk), readable in vectors of 16 bytes."""
    if tokens == 0:
        return
    strides = [stride // kv.dtype.itemsize for stride in kv.strides]
    kv_strides = (page_size * strides[0], strides[0]) if kv.ndim == 2 else (strides[0], strides[1])
    params = _template(*kv_strides, cache.strides[0], tokens, page_size, power_of_two).fill(kv.data.ptr, cache.data.ptr)
    kernel.launch((-(-tokens // _TOKENS_PER_BLOCK), 1, 1), params, pdl=True, stream_ptr=stream_ptr)


@functools.lru_cache(maxsize=256)
def _template(kv_stride_page: int, kv_stride_token: int, cache_stride_page: int, tokens: int, page_size: int,
              power_of_two: bool) -> _device.ParamTemplate:
    magic, shift = kernel_params.divisor(page_size)
    return _device.ParamTemplate(
        "KvQuantParams", kv_stride_page=kv_stride_page, kv_stride_token=kv_stride_token,
        cache_stride_page=cache_stride_page, tokens=tokens, page_size=page_size, page_size_magic=magic,
        page_size_shift=shift, power_of_two_scales=power_of_two)


def _launch_token_indices(kernel, arrays: dict, indices, page_size: int, stream_ptr: int) -> None:
    """Temporaries (arrays that the kernel cannot read as they are) are gone when this returns."""
    if indices.size == 0:
        return
    batch = indices.shape[0]
    table, positions = (_int32_rows(name, x, stream_ptr) for name, x in arrays.items())
    per_request = math.prod(indices.shape[1:])
    params = _indices_template(_row_stride(table), _row_stride(positions), batch, per_request, table.shape[1],
                               page_size).fill(table.data.ptr, positions.data.ptr, indices.data.ptr)
    kernel.launch((-(-indices.size // _INDICES_PER_BLOCK), 1, 1), params, pdl=True, stream_ptr=stream_ptr)


def _int32_rows(name: str, x: Any, stream_ptr: int) -> Any:
    """x with int32 rows along axis 0, each contiguous."""
    if isinstance(x, np.ndarray):
        return _device.upload(name, x, stream_ptr)
    if x.dtype == np.int32 and (x.flags.c_contiguous or (x.ndim == 2 and x.strides[1] == 4)):
        return x
    return _device.as_int32(x)


def _row_stride(x: Any) -> int:
    return x.strides[0] // 4


@functools.lru_cache(maxsize=256)
def _indices_template(table_stride: int, positions_stride: int, batch: int, per_request: int, table_width: int,
                      page_size: int) -> _device.ParamTemplate:
    per_request_magic, per_request_shift = kernel_params.divisor(per_request)
    page_size_magic, page_size_shift = kernel_params.divisor(page_size)
    return _device.ParamTemplate(
        "TokenIndicesParams", block_table_stride=table_stride, positions_stride=positions_stride,
        count=batch * per_request, per_request=per_request, per_request_magic=per_request_magic,
        per_request_shift=per_request_shift, table_width=table_width, page_size=page_size,
        page_size_magic=page_size_magic, page_size_shift=page_size_shift)
