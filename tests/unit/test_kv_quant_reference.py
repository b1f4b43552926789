"""The FP8 cache in NumPy: the byte layout, the rules for hostile values, and the round trip against the e4m3 bound."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from flashmla_cupy.kv_format import D512, FORMATS, MIN_SCALE, V32
from flashmla_cupy.reference import kv_quant
from flashmla_cupy.reference._numerics import round_to

BF16 = np.dtype(ml_dtypes.bfloat16)
LAYOUTS = pytest.mark.parametrize("layout", FORMATS.values(), ids=FORMATS)
E4M3_VALUES = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def random_kv(layout, pages=3, page_size=5, dtype=BF16, seed=0):
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-12, 12, (pages, page_size, 1, layout.tiles + 1)).astype(np.float64))
    scale = np.repeat(scale, layout.tile, axis=-1)[..., :layout.d_qk]
    return (rng.standard_normal((pages, page_size, 1, layout.d_qk)) * scale).astype(np.float32).astype(dtype)


def one_tile(values, layout=V32, dtype=np.float32, **options):
    """The codes and the scale of a tile that begins with `values`, zeros after them, and what they read back as."""
    kv = np.zeros((1, 1, 1, layout.d_qk), dtype)
    kv[..., :len(values)] = np.asarray(values, dtype)
    cache = kv_quant.quantize(kv, layout, **options)
    parts = kv_quant.parts_of(cache, layout)
    scale = kv_quant.scale_values(parts.scales)[0, 0, 0]
    return parts.codes[0, 0, :len(values)], scale, kv_quant.dequantize(cache, layout)[0, 0, 0, :len(values)]


# ---- bytes
def test_sizes():
    assert (V32.d_qk, V32.tiles, V32.bytes_per_token, V32.row_bytes, V32.rope_offset) == (576, 4, 656, 656, 528)
    assert (V32.scale_offset(64), V32.scale_stride, V32.page_bytes(64)) == (512, 656, 64 * 656)
    assert (D512.d_qk, D512.tiles, D512.bytes_per_token, D512.row_bytes, D512.rope_offset) == (512, 7, 584, 576, 448)
    assert (D512.scale_offset(64), D512.scale_stride, D512.page_bytes(64)) == (64 * 576, 8, 65 * 576)


def test_v32_token_byte_by_byte():
    kv = random_kv(V32)
    cache = kv_quant.quantize(kv, V32)
    assert cache.shape == (3, 5, 1, 656) and cache.dtype == np.uint8 and cache.strides == (5 * 656, 656, 656, 1)
    token = cache[1, 2, 0].tobytes()
    values = kv[1, 2, 0].astype(np.float32)
    for tile in range(4):
        scale, = np.frombuffer(token, "<f4", 1, 512 + 4 * tile)
        assert scale == np.abs(values[128 * tile:128 * tile + 128]).max() / np.float32(448)
        codes = np.frombuffer(token, ml_dtypes.float8_e4m3fn, 128, 128 * tile)
        expected = (values[128 * tile:128 * tile + 128] / scale).astype(ml_dtypes.float8_e4m3fn)
        assert codes.tobytes() == expected.tobytes()
    assert token[528:] == kv[1, 2, 0, 512:].tobytes()


def test_d512_page_byte_by_byte():
    kv = random_kv(D512, page_size=3)
    cache = kv_quant.quantize(kv, D512)
    assert cache.shape == (3, 3, 1, 584) and cache.strides == (4 * 576, 584, 584, 1)
    page = np.lib.stride_tricks.as_strided(cache[1], (4 * 576,)).tobytes()
    for slot in range(3):
        row, scales = page[576 * slot:576 * (slot + 1)], page[3 * 576 + 8 * slot:3 * 576 + 8 * (slot + 1)]
        values = kv[1, slot, 0].astype(np.float32)
        for tile in range(7):
            scale = np.float32(2.0) ** (scales[tile] - 127)
            amax = np.abs(values[64 * tile:64 * tile + 64]).max()
            assert 448 * scale >= amax > 224 * scale
            expected = (values[64 * tile:64 * tile + 64] / scale).astype(ml_dtypes.float8_e4m3fn)
            assert row[64 * tile:64 * tile + 64] == expected.tobytes()
        assert scales[7] == 0 and row[448:] == kv[1, slot, 0, 448:].tobytes()
    assert not any(page[3 * 584:]), "the padding of a new page is zero"


@LAYOUTS
@pytest.mark.parametrize("gap", [0, 16, 4096])
def test_page_stride_is_honoured_and_nothing_else_written(layout, gap):
    kv, page_bytes = random_kv(layout, pages=3, page_size=7), 7 * layout.bytes_per_token
    buffer = np.full((3, page_bytes + gap), 0xA5, np.uint8)
    cache = np.lib.stride_tricks.as_strided(buffer, (3, 7, 1, layout.bytes_per_token),
                                            (page_bytes + gap, *[layout.bytes_per_token] * 2, 1))
    assert kv_quant.quantize(kv, layout, out=cache) is cache
    assert (buffer[:, page_bytes:] == 0xA5).all()
    tight = kv_quant.quantize(kv, layout)
    np.testing.assert_array_equal(cache, tight)
    np.testing.assert_array_equal(kv_quant.dequantize(cache, layout), kv_quant.dequantize(tight, layout))


@LAYOUTS
@pytest.mark.parametrize("pages, page_size", [(0, 64), (2, 0), (1, 1)])
def test_empty_and_smallest(layout, pages, page_size):
    kv = random_kv(layout, pages, page_size)
    cache = kv_quant.quantize(kv, layout)
    assert cache.shape == (pages, page_size, 1, layout.bytes_per_token)
    assert kv_quant.dequantize(cache, layout).shape == kv.shape


@LAYOUTS
def test_rope_keeps_its_bits(layout):
    kv = np.zeros((1, 1, 1, layout.d_qk), BF16)
    bits = np.array([0x7F80, 0xFF80, 0x7FC1, 0xFFFF, 0x0001, 0x8000, 0x7F7F], np.uint16)
    kv[0, 0, 0, layout.d_nope:layout.d_nope + 7] = bits.view(BF16)
    cache = kv_quant.quantize(kv, layout)
    back = kv_quant.parts_of(cache, layout).rope[0, 0, :7].view(np.uint16)
    np.testing.assert_array_equal(back, bits)


# ---- rules
@LAYOUTS
@pytest.mark.parametrize("power_of_two", [False, True])
def test_zeros_stay_zero_under_a_finite_positive_scale(layout, power_of_two):
    kv = np.zeros((2, 3, 1, layout.d_qk), BF16)
    cache = kv_quant.quantize(kv, layout, power_of_two_scales=power_of_two)
    assert (kv_quant.scale_values(kv_quant.parts_of(cache, layout).scales) == 1).all()
    assert (kv_quant.dequantize(cache, layout) == 0).all()
    codes, _, back = one_tile([0.0, -0.0, 3.0], layout)
    assert codes[:2].tolist() == [0x00, 0x80] and (back[:2] == 0).all()


@LAYOUTS
@pytest.mark.parametrize("tiny", [1e-30, 1e-36, MIN_SCALE, 2.0**-133])
def test_tiny_values(layout, tiny):
    _, scale, back = one_tile([tiny, -tiny], layout)
    assert np.isfinite(scale) and scale >= MIN_SCALE
    assert abs(back - [tiny, -tiny]).max() <= max(abs(tiny) * 2.0**-4, MIN_SCALE * 2.0**-10)


@pytest.mark.parametrize("scale", [1.0, 0.75, 1 / 3, 1.0039, 2.0**-13, 2.0**10, 1e-30])
def test_exactly_448_times_the_scale(scale):
    amax = np.float32(448) * np.float32(scale)
    codes, got, back = one_tile([amax, -amax, amax / 2])
    assert got == np.maximum(amax / np.float32(448), np.float32(MIN_SCALE))
    assert codes.tolist()[:2] == [0x7E, 0xFE]
    assert back[0] == np.float32(448 * np.float64(got)) == -back[1]


def test_saturation():
    values = np.array([448, 449, 464, 480, 1e30, np.inf, -448.1, -1e38, -np.inf], np.float32)
    codes = kv_quant.encode_e4m3(values)
    assert codes.tolist() == [0x7E] * 6 + [0xFE] * 3


@LAYOUTS
@pytest.mark.parametrize("power_of_two", [False, True])
def test_nan_and_inf_stay_where_they_are(layout, power_of_two):
    clean = random_kv(layout, 1, 1)
    clean[..., [3, 5, 6, 9]] = 0
    dirty = clean.copy()
    dirty[0, 0, 0, [3, 5, 6, 9]] = np.array([0x7FC0, 0xFFC0, 0x7F80, 0xFF80], np.uint16).view(BF16)  # nan -nan inf -inf
    expected, got = (kv_quant.quantize(kv, layout, power_of_two_scales=power_of_two) for kv in (clean, dirty))
    changed = np.argwhere(expected[0, 0, 0] != got[0, 0, 0]).ravel().tolist()
    assert changed == [3, 5, 6, 9] and got[0, 0, 0, changed].tolist() == [0x7F, 0x7F, 0x7E, 0xFE]
    values = kv_quant.dequantize(got, layout)[0, 0, 0]
    scale = kv_quant.scale_values(kv_quant.parts_of(got, layout).scales)[0, 0, 0]
    assert np.isnan(values[[3, 5]]).all() and values[6] == np.float32(448) * scale == -values[9]
    assert np.isfinite(np.delete(values, [3, 5])).all()


def test_a_tile_of_nothing_finite():
    codes, scale, _ = one_tile([np.nan, np.inf, -np.inf])
    assert scale == 1 and codes.tolist() == [0x7F, 0x7E, 0xFE]


@pytest.mark.parametrize("amax, exponent", [
    (448.0, 0), (449.0, 1), (447.0, 0), (224.0, -1), (225.0, 0), (1.75, -8), (1.7578125, -7), (1e-38, -126),
    (3.3e38, 120)])
def test_smallest_power_of_two(amax, exponent):
    scale = kv_quant.tile_scales(np.array([[amax, -amax / 2]], np.float32), power_of_two=True)
    assert scale == np.float32(2.0**exponent)


def test_large_values_do_not_overflow():
    largest = float(ml_dtypes.finfo(BF16).max)
    codes, scale, back = one_tile([largest, -largest], dtype=BF16)
    assert codes.tolist() == [0x7E, 0xFE] and np.isfinite(scale) and np.isfinite(back).all()
    codes, scale, back = one_tile([1.875 * 2.0**127], dtype=BF16, power_of_two_scales=True)
    assert scale == 2.0**120 and back == 1.875 * 2.0**127
    codes, scale, back = one_tile([largest], dtype=BF16, power_of_two_scales=True)
    assert codes == [0x78] and np.isinf(back)  # the nearest multiple is 2^128


# ---- round trip
def tiles(width):
    return st_numpy.arrays(np.float32, st.just((3, width)), elements=st.floats(
        -(2.0**100), 2.0**100, width=32, allow_subnormal=True), fill=st.sampled_from([0.0, 1.0, 1e-3]))


@settings(max_examples=150, deadline=None)
@given(values=tiles(128), power_of_two=st.booleans(), exponent=st.integers(-40, 20))
def test_round_trip_is_within_half_an_e4m3_step(values, power_of_two, exponent):
    """|error| <= 2^-4 |value|, or half the smallest step: 2^-10 scale; with the roundings of scale and quotient."""
    values = np.ldexp(values, exponent).astype(np.float32)
    scale = kv_quant.tile_scales(values, power_of_two=power_of_two)[:, None].astype(np.float64)
    with np.errstate(under="ignore"):
        codes = kv_quant.encode_e4m3((values / scale.astype(np.float32)).astype(np.float32))
    back = kv_quant.decode_e4m3(codes).astype(np.float64) * scale
    bound = np.maximum(2.0**-4 * np.abs(values.astype(np.float64)), 2.0**-10 * scale) * (1 + 2.0**-20)
    assert (np.abs(back - values) <= bound).all()
    assert (np.abs(values) <= 448 * scale * (1 + 2.0**-22)).all()


@settings(max_examples=60, deadline=None)
@given(codes=st_numpy.arrays(np.uint8, (7, 64)), scales=st_numpy.arrays(np.uint8, (7,)))
def test_ue8m0_products_are_exact(codes, scales):
    cache = np.zeros((1, 1, 1, D512.bytes_per_token), np.uint8)
    cache[0, 0, 0, :448], cache[0, 0, 0, 576:583] = codes.ravel(), scales
    values = kv_quant.dequantize(cache, D512)[0, 0, 0, :448].reshape(7, 64)
    for tile in range(7):
        scale = np.nan if scales[tile] == 255 else 2.0 ** (int(scales[tile]) - 127)
        expected = E4M3_VALUES[codes[tile]] * scale
        with np.errstate(over="ignore"):
            np.testing.assert_array_equal(values[tile], expected.astype(np.float32))


@pytest.mark.parametrize("scales", [(0.75, 1.0039, 1 / 3, 1.0), (2.0**-13, 1e-3 / 3, 7.77, 2.0**10)])
@pytest.mark.parametrize("dtype", [np.float32, BF16], ids=str)
def test_float32_scales_are_honoured_to_one_rounding(scales, dtype):
    cache = np.zeros((1, 256, 1, V32.bytes_per_token), np.uint8)
    parts = kv_quant.parts_of(cache, V32)
    parts.codes[...] = np.arange(256, dtype=np.uint8)[:, None]
    parts.scales[...] = np.array(scales, np.float32)
    back = kv_quant.dequantize(cache, V32, dtype=dtype)[0, :, 0, :512:128].astype(np.float32)
    for code, tile in itertools.product(range(256), range(4)):
        if code & 0x7F == 0x7F:
            assert np.isnan(back[code, tile])
            continue
        exact = Fraction(E4M3_VALUES[code]) * Fraction(float(np.float32(scales[tile])))
        got = Fraction(float(back[code, tile]))
        bits = 24 if dtype == np.float32 else 8
        assert abs(got - exact) <= abs(exact) / 2**bits
        neighbours = np.array([back[code, tile]], dtype).view(np.uint32 if bits == 24 else np.uint16)
        for step in (-1, 1) if got else ():
            other = Fraction(float((neighbours + neighbours.dtype.type(step % (1 << 8 * neighbours.itemsize))).view(
                dtype).astype(np.float32)[0]))
            assert abs(got - exact) <= abs(other - exact)


# ---- how the kernels compute it
def _fma(a: Fraction, b: Fraction, c: Fraction) -> Fraction:
    return _float32(a * b + c)


def _float32(x: Fraction) -> Fraction:
    """x rounded to 24 significand bits, ties to even (no limit on the exponent)."""
    if x == 0:
        return x
    exponent = abs(x.numerator).bit_length() - x.denominator.bit_length() - 24
    while abs(x) / Fraction(2) ** exponent >= 2**24:
        exponent += 1
    while abs(x) / Fraction(2) ** exponent < 2**23:
        exponent -= 1
    return round(x / Fraction(2) ** exponent) * Fraction(2) ** exponent  # round(): ties to even


def test_quotients_of_the_kernel_are_correctly_rounded():
    """x * (1 / scale) and one correction, over all significands of a bfloat16 x and of a bfloat16 amax."""
    for amax in range(128, 256):
        scale = _float32(Fraction(amax, 448))
        reciprocal = _float32(1 / scale)
        for x in map(Fraction, range(128, 256)):
            q = _float32(x * reciprocal)
            corrected = _fma(-_fma(q, scale, -x), reciprocal, q)
            assert corrected == _float32(x / scale), (amax, x)


@settings(max_examples=300, deadline=None)
@given(codes=st_numpy.arrays(np.uint8, 64), bits=st.integers(1 << 23, (255 << 23) - 1), ties=st.booleans())
def test_rounding_to_odd_first_gives_the_product_rounded_once(codes, bits, ties):
    if ties:  # scales whose product with a power of two lies between two bfloat16
        bits = bits & ~0xFFFF | 0x8000
    scale = np.uint32(bits).view(np.float32)
    values = kv_quant.decode_e4m3(codes)[codes & 0x7F != 0x7F]
    exact = values.astype(np.float64) * np.float64(scale)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        nearest = exact.astype(np.float32)
        down = np.where(nearest > exact, np.nextafter(nearest, np.float32(-np.inf)), nearest)
        up = np.where(nearest < exact, np.nextafter(nearest, np.float32(np.inf)), nearest)
        to_odd = np.where(down.view(np.uint32) & 1, down, up)
        np.testing.assert_array_equal(to_odd.astype(BF16).astype(np.float64), round_to(exact, BF16, xp=np))


# ---- token_indices
def test_token_indices():
    table = np.array([[5, 2, -1], [0, 2**31 - 1, 7]], np.int32)
    positions = np.array([[0, 3, 4, 7, 8, 12, -1], [3, 4, 11, 8, 2**31 - 1, -(2**31), 12]], np.int32)
    got = kv_quant.token_indices(table, positions, 4)
    assert got.dtype == np.int32
    assert got.tolist() == [[20, 23, 8, 11, -1, -1, -1], [3, -1, 31, 28, -1, -1, -1]]


@settings(max_examples=60, deadline=None)
@given(data=st.data(), page_size=st.integers(1, 70), batch=st.integers(0, 3), width=st.integers(0, 4))
def test_token_indices_against_a_loop(data, page_size, batch, width):
    integers = st.integers(-(2**31), 2**31 - 1) | st.integers(-2, 300)
    table = data.draw(st_numpy.arrays(np.int32, (batch, width), elements=integers))
    positions = data.draw(st_numpy.arrays(np.int32, (batch, 2, 3), elements=integers))
    got = kv_quant.token_indices(table, positions, page_size)
    for place in np.ndindex(positions.shape):
        position = int(positions[place])
        expected = -1
        if 0 <= position < width * page_size and (page := int(table[place[0], position // page_size])) >= 0:
            expected = page * page_size + position % page_size
        assert got[place] == (expected if expected < 2**31 else -1)
