"""The FP8 cache kernels against their NumPy twins, bit for bit."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flashmla_cupy
from flashmla_cupy.kv_format import FORMATS
from flashmla_cupy.reference import kv_quant as reference

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)
LAYOUTS = pytest.mark.parametrize("layout", FORMATS.values(), ids=FORMATS)
DTYPES = pytest.mark.parametrize("dtype", [BF16, np.dtype(np.float32)], ids=str)


@pytest.fixture(scope="module")
def cp():
    import cupy

    return cupy


def hostile_kv(tokens, layout, dtype, seed=0):
    """(tokens, d_qk): magnitudes over the whole range, zero tiles, -0, subnormals, Inf and NaN of both signs, ties."""
    rng = np.random.default_rng(seed)
    kv = rng.standard_normal((tokens, layout.d_qk))
    exponents = rng.integers(-140, 127, (tokens, layout.d_qk // layout.tile + 1))
    kv = np.ldexp(kv, np.repeat(np.where(rng.random(exponents.shape) < 0.5, 0, exponents), layout.tile, axis=1)[
        :, :layout.d_qk])
    kv[rng.random(kv.shape) < 0.02] = 0
    kv[rng.random(kv.shape) < 0.02] = -0.0
    ties = rng.random(kv.shape) < 0.2  # multiples of a sixteenth of a power of two
    kv[ties] = np.ldexp(rng.integers(-35, 36, kv.shape), rng.integers(-8, 4, kv.shape))[ties]
    with np.errstate(over="ignore"):
        kv = kv.astype(np.float32)
    kv[::7, :layout.tile] = 0
    for special in (np.nan, -np.nan, np.inf, -np.inf):
        kv[rng.random(kv.shape) < 0.0005] = special
    kv[5:6, layout.tile:2 * layout.tile] = np.inf
    kv[6:7, layout.tile:2 * layout.tile] = np.nan
    with np.errstate(over="ignore"):
        return kv.astype(dtype)


def same_values(got, expected):
    """Equal bits; a NaN may have any payload."""
    bits = np.uint16 if expected.dtype == BF16 else np.uint32
    nan = np.isnan(expected.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(got.astype(np.float32)), nan)
    np.testing.assert_array_equal(got.view(bits)[~nan], expected.view(bits)[~nan])


def same_caches(got, expected, layout):
    got, expected = reference.parts_of(got, layout), reference.parts_of(expected, layout)
    np.testing.assert_array_equal(got.codes, expected.codes)
    np.testing.assert_array_equal(got.scales.view(np.uint8), expected.scales.view(np.uint8))
    np.testing.assert_array_equal(got.unused, expected.unused)
    same_values(got.rope.copy(), expected.rope.copy())


def to_host(cache, layout):
    """A device cache as NumPy bytes in the layout's own strides."""
    host = reference.empty_cache(*cache.shape[:2], layout)
    host[...] = cache.get()
    return host


def to_device(cp, cache):
    """A cache of `reference.empty_cache` on the device, with the same page stride."""
    pages = np.lib.stride_tricks.as_strided(cache, (len(cache), cache.strides[0]), (cache.strides[0], 1))
    buffer = cp.asarray(pages)
    return cp.ndarray(cache.shape, np.uint8, buffer.data, cache.strides)


@LAYOUTS
@DTYPES
@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("page_size, tokens", [(64, 64 * 37), (1, 9), (64, 4095), (7, 700), (256, 1)])
def test_quantize_is_bit_identical(cp, layout, dtype, power_of_two, page_size, tokens):
    kv = hostile_kv(tokens, layout, dtype)
    options = dict(layout=layout.name, page_size=page_size, power_of_two_scales=power_of_two)
    cache = flashmla_cupy.quantize_kv_cache(cp.asarray(kv), **options)
    same_caches(to_host(cache, layout), flashmla_cupy.quantize_kv_cache(kv, **options), layout)


@LAYOUTS
@DTYPES
def test_quantize_over_all_significands(cp, layout, dtype):
    """Every pair of an amax and a value of bfloat16 significands, at exponents where e4m3 is normal and subnormal."""
    amax, value = np.meshgrid(np.arange(128, 256), np.arange(128, 256), indexing="ij")
    tile = layout.tile
    for exponent in (-1, -4, -9, -14, -16, -18):
        pairs = np.ldexp(value.astype(np.float32), exponent).reshape(-1, tile // 2)
        tops = amax.reshape(-1, tile // 2)
        kv = np.zeros((len(pairs), layout.d_qk), np.float32)
        kv[:, 0], kv[:, tile // 2:tile] = tops[:, 0], pairs
        kv = kv.astype(dtype)
        cache = flashmla_cupy.quantize_kv_cache(cp.asarray(kv), layout=layout.name, page_size=64)
        expected = flashmla_cupy.quantize_kv_cache(kv, layout=layout.name, page_size=64)
        same_caches(to_host(cache, layout), expected, layout)


@LAYOUTS
@DTYPES
@pytest.mark.parametrize("pages, page_size", [(33, 64), (5, 1), (3, 100)])
def test_dequantize_is_bit_identical(cp, layout, dtype, pages, page_size):
    rng = np.random.default_rng(3)
    host = reference.empty_cache(pages, page_size, layout)
    host[...] = rng.integers(0, 256, host.shape)  # any code, any scale, subnormal, Inf and NaN ones too
    parts = reference.parts_of(host, layout)
    if layout.scale == "float32":
        parts.scales[::2] = np.exp2(rng.uniform(-20, 20, parts.scales[::2].shape))
        ties = parts.scales[1::2].view(np.uint32)
        ties[...] = ties & 0xFFFF0000 | 0x8000  # products half way between two bfloat16
    back = flashmla_cupy.dequantize_kv_cache(to_device(cp, host), layout=layout.name, dtype=dtype)
    same_values(back.get(), reference.dequantize(host, layout, dtype=dtype))


@LAYOUTS
def test_page_strides_and_guard_bands(cp, layout):
    """Pages of one layer among several: nothing outside its tokens is written."""
    pages, page_size, gap = 9, 64, 1280
    page_bytes = page_size * layout.bytes_per_token
    kv = hostile_kv(pages * page_size, layout, BF16).reshape(pages, page_size, 1, layout.d_qk)
    buffer = cp.full((pages, page_bytes + gap), 0xA5, np.uint8)
    view = cp.ndarray((pages, page_size, 1, layout.bytes_per_token), np.uint8, buffer.data + 16 * 40,
                      (page_bytes + gap, *[layout.bytes_per_token] * 2, 1))
    assert flashmla_cupy.quantize_kv_cache(cp.asarray(kv), layout=layout.name, out=view) is view
    host = buffer.get()
    assert (host[:, :640] == 0xA5).all() and (host[:, 640 + page_bytes:] == 0xA5).all()
    same_caches(to_host(view, layout), reference.quantize(kv, layout), layout)
    out = cp.full((pages, page_size, 3, layout.d_qk), np.nan, np.float32).astype(BF16)
    flashmla_cupy.dequantize_kv_cache(view, layout=layout.name, out=out[:, :, 1:2])
    same_values(out[:, :, 1:2].get(), reference.dequantize(to_host(view, layout), layout, dtype=BF16))
    assert bool(cp.isnan(out[:, :, ::2].astype(np.float32)).all())


def test_views_that_vectors_cannot_read(cp):
    kv = hostile_kv(130, FORMATS["v32"], BF16)
    wide = cp.zeros((130, 580), BF16)
    wide[:, 1:577] = cp.asarray(kv)
    cache = flashmla_cupy.quantize_kv_cache(wide[:, 1:577], page_size=64)
    same_caches(to_host(cache, FORMATS["v32"]), flashmla_cupy.quantize_kv_cache(kv, page_size=64), FORMATS["v32"])
    out = cp.zeros((3, 64, 1, 580), BF16)[..., 1:577]
    flashmla_cupy.dequantize_kv_cache(cache, out=out)
    same_values(out.get(), flashmla_cupy.dequantize_kv_cache(cache).get())


@pytest.mark.parametrize("shape", [(1, 1), (3, 2048), (128, 2, 133), (70000, 3)], ids=str)
@pytest.mark.parametrize("page_size", [1, 48, 64])
def test_token_indices(cp, shape, page_size):
    rng = np.random.default_rng(len(shape))
    table = rng.integers(-1, 1 << 20, (shape[0], 37)).astype(np.int32)
    table[:, -1] = 2**31 - 1
    positions = rng.integers(-3, 40 * page_size, shape).astype(np.int32)
    positions.reshape(-1)[:1] = 2**31 - 1
    device_table = cp.asarray(np.pad(table, ((0, 0), (0, 5))))[:, :37]
    got = flashmla_cupy.token_indices(device_table, cp.asarray(positions), page_size)
    np.testing.assert_array_equal(got.get(), reference.token_indices(table, positions, page_size))


def test_in_a_graph(cp):
    """Captured once, replayed over other content."""
    layout = FORMATS["v32"]
    kv = cp.zeros((128, 576), BF16)
    cache = cp.zeros((2, 64, 1, layout.bytes_per_token), np.uint8)
    back = cp.zeros((2, 64, 1, 576), BF16)

    def call():
        flashmla_cupy.quantize_kv_cache(kv, page_size=64, out=cache)
        flashmla_cupy.dequantize_kv_cache(cache, out=back)

    call()
    with cp.cuda.Stream(non_blocking=True) as stream:
        stream.begin_capture()
        call()
        graph = stream.end_capture()
    content = hostile_kv(128, layout, BF16)
    kv[...] = cp.asarray(content)
    cp.cuda.get_current_stream().synchronize()
    graph.launch()
    cp.cuda.Device().synchronize()
    expected = flashmla_cupy.quantize_kv_cache(content, page_size=64)
    same_values(back.get(), flashmla_cupy.dequantize_kv_cache(expected))
