"""The sparse and FP8 references against loops in plain Python that decode the caches byte by byte."""

from __future__ import annotations

import math
import struct

import ml_dtypes
import numpy as np
import pytest

from flashmla_cupy.kv_format import D512, V32
from flashmla_cupy.reference import combine, dense_decode, kv_quant, sparse_decode
from flashmla_cupy.reference._numerics import round_to

BF16 = np.dtype(ml_dtypes.bfloat16)
INT_MIN, INT_MAX = -(2**31), 2**31 - 1
LAYOUTS = [V32, D512]


# ---- one number at a time ----
def e4m3(code):
    sign, exponent, mantissa = -1.0 if code & 0x80 else 1.0, code >> 3 & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def bf16s(raw):
    return [struct.unpack("<f", b"\0\0" + raw[i:i + 2])[0] for i in range(0, len(raw), 2)]


def token(cache, page, offset):
    """The 576 or 512 values of a token of an FP8 cache, from the bytes as they lie in memory."""
    page_size, width = cache.shape[1], cache.shape[3]
    raw = cache.view(np.uint8)[page, :, 0].tobytes()
    if width == 656:
        row = raw[656 * offset:656 * (offset + 1)]
        scales = struct.unpack("<4f", row[512:528])
        return [e4m3(row[i]) * scales[i // 128] for i in range(512)] + bf16s(row[528:])
    row = raw[576 * offset:576 * (offset + 1)]
    scales = [2.0 ** (byte - 127) for byte in raw[576 * page_size + 8 * offset:][:7]]
    return [e4m3(row[i]) * scales[i // 64] for i in range(448)] + bf16s(row[448:])


def keys_of(cache, indices, length, head):
    """Keys that one query attends to."""
    page_size, keys = cache.shape[1], []
    for lane, slot in enumerate(int(i) for i in indices):
        if 0 <= slot < cache.shape[0] * page_size and (length is None or lane < length):
            page, offset = divmod(slot, page_size)
            fp8 = cache.dtype.itemsize == 1
            keys.append(token(cache, page, offset) if fp8 else [float(x) for x in cache[page, offset, head]])
    return keys


def brute_force(q, caches, d_v, scale, sink=None, cast=lambda x: x, cast_key=lambda x: x):
    """caches: (cache, indices with a h_kv axis, topk_length or None) of each selection."""
    batch, s_q, h_q, _ = q.shape
    group = h_q // caches[0][0].shape[2]
    out, lse = np.zeros((batch, s_q, h_q, d_v)), np.full((batch, h_q, s_q), -math.inf)
    for b, i, h in np.ndindex(batch, s_q, h_q):
        keys = [key for cache, indices, lengths in caches for key in
                keys_of(cache, indices[b, i, h // group], None if lengths is None else lengths[b], h // group)]
        if not keys:
            continue
        keys = [[cast_key(x) for x in key] for key in keys]
        query = [float(x) for x in q[b, i, h]]
        scores = [scale * math.fsum(x * y for x, y in zip(query, key, strict=True)) for key in keys]
        top = max(scores)
        weights = [math.exp(s - top) for s in scores]
        total = math.fsum(weights)
        lse[b, h, i] = top + math.log(total)
        share = 1.0
        if sink is not None:
            share = 0.0 if sink[h] == math.inf else 1 / (1 + math.exp(sink[h] - lse[b, h, i]))
        for d in range(d_v):
            out[b, i, h, d] = cast(math.fsum(cast(w) * key[d] for w, key in zip(weights, keys, strict=True))
                                   / total * share)
    return out, lse


# ---- inputs ----
def fp8_cache(rng, layout, pages=3, page_size=16, gap=0):
    """Random codes, awkward scales; `gap` bytes of NaN codes between pages."""
    stride = layout.page_bytes(page_size) + gap
    pool = np.full((pages, stride), 0x7F, np.uint8)
    width = layout.bytes_per_token
    cache = np.lib.stride_tricks.as_strided(pool, (pages, page_size, 1, width), (stride, width, width, 1))
    parts = kv_quant.parts_of(cache, layout)
    codes = rng.integers(0, 256, parts.codes.shape, dtype=np.uint8)
    parts.codes[...] = np.where(codes & 0x7F == 0x7F, 0x30, codes)
    if layout is V32:
        parts.scales[...] = rng.choice([0.75, 1.0039, 1 / 3, 2.0**-10, 1e-3], parts.scales.shape) / 64
    else:
        parts.scales[...] = rng.integers(112, 122, parts.scales.shape)
    parts.rope[...] = rng.standard_normal(parts.rope.shape).astype(BF16)
    return cache


def query(rng, layout, batch=2, s_q=2, h_q=3):
    return rng.standard_normal((batch, s_q, h_q, layout.d_qk)).astype(BF16)


def equal(a, b):
    for x, y in zip(a, b, strict=True):
        np.testing.assert_array_equal(x, y)


def close(got, expected):
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-12, atol=1e-13)
    assert got[0].dtype == got[1].dtype == np.float64


SOME_INDICES = np.array([[[3, 0, 47, 3, -1, 48, 17], [INT_MIN, 5, 5, 5, INT_MAX, -2, 31]],
                         [[-1] * 7, [8, 9, 10, 11, 12, 13, 14]]], np.int32)  # of 48 slots


# ---- numbers ----
@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float64], ids=str)
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("h_kv", [1, 2])
def test_16_bit_cache_matches_brute_force(dtype, per_head, h_kv):
    rng = np.random.default_rng(1)
    q = rng.standard_normal((2, 2, 4, 24)).astype(dtype)
    cache, extra = (rng.standard_normal((pages, size, h_kv, 24)).astype(dtype) for pages, size in ((3, 16), (5, 7)))
    all_heads = rng.integers(-3, 50, (2, 2, h_kv, 7)).astype(np.int32)
    if not per_head:
        all_heads[...] = SOME_INDICES[:, :, None]
    indices = all_heads if per_head else SOME_INDICES
    extra_indices = rng.integers(-5, 40, (2, 2, 9)).astype(np.int32)
    lengths, extra_lengths = np.array([6, 9]), np.array([0, 5])
    sink = np.array([0.5, -math.inf, math.inf, 2], np.float32)
    got = sparse_decode.attend(q, cache, indices, 8, softmax_scale=0.3, topk_length=lengths, attn_sink=sink,
                               extra_k_cache=extra, extra_indices=extra_indices, extra_topk_length=extra_lengths)
    extra_per_head = np.broadcast_to(extra_indices[:, :, None], (2, 2, h_kv, 9))
    close(got, brute_force(q, [(cache, all_heads, lengths), (extra, extra_per_head, extra_lengths)], 8, 0.3, sink))


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("page_size, gap", [(16, 0), (16, 1040), (1, 0), (3, 16)])
def test_fp8_cache_matches_brute_force(layout, page_size, gap):
    rng = np.random.default_rng(2)
    q, cache = query(rng, layout), fp8_cache(rng, layout, 48 // page_size, page_size, gap)
    extra, extra_indices = fp8_cache(rng, layout, 2, 5), np.array([[[9, 10, 0]] * 2, [[1, -1, 9]] * 2], np.int32)
    got = sparse_decode.attend(q, cache, SOME_INDICES, 512, extra_k_cache=extra, extra_indices=extra_indices)
    expected = brute_force(q, [(cache, SOME_INDICES[:, :, None], None), (extra, extra_indices[:, :, None], None)], 512,
                           layout.d_qk**-0.5)
    close(got, expected)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_rounded_mode_rounds_keys_weights_and_output(layout):
    rng = np.random.default_rng(3)
    q, cache = query(rng, layout, batch=1, h_q=2), fp8_cache(rng, layout)
    cast = lambda x: float(round_to(np.float64(x), BF16))  # noqa: E731
    sink = np.array([0.0, 3.0], np.float32)
    got = sparse_decode.attend(q, cache, SOME_INDICES[:1], 16, attn_sink=sink, mode="rounded")
    expected = brute_force(q, [(cache, SOME_INDICES[:1, :, None], None)], 16, layout.d_qk**-0.5, sink, cast, cast)
    np.testing.assert_array_equal(got[0], got[0].astype(BF16).astype(np.float64))
    assert (got[0] != expected[0]).mean() < 0.03  # a last-bit difference may cross a rounding boundary, hardly ever
    np.testing.assert_allclose(got[0], expected[0], rtol=2.0**-7, atol=1e-7)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-12)


@pytest.mark.parametrize("topk", [1, 6, 64, 100, 128, 133, 192, 256, 512, 576, 640, 1024, 1152, 2048, 2176])
def test_any_width_equals_the_dense_reference(topk):
    rng = np.random.default_rng(topk)
    q, cache = query(rng, V32, batch=1, s_q=1, h_q=2), fp8_cache(rng, V32, 40, 64)
    slots = rng.permutation(40 * 64)[:topk].astype(np.int32)
    keys = kv_quant.dequantize(cache, V32, dtype=np.float64).reshape(-1, 1, 576)[slots]
    got = sparse_decode.attend(q, cache, slots.reshape(1, 1, topk))
    close(got, dense_decode.attend(q, keys[None], None, np.array([topk])))


def test_the_full_float32_scale_counts():
    """A scale with 24 significant bits, and scales 2^23 apart in one token."""
    cache = kv_quant.empty_cache(1, 1, V32)
    parts = kv_quant.parts_of(cache, V32)
    parts.codes[...] = 0x38 + 5  # 1.625
    parts.scales[0, 0] = scales = np.array([2.0**-13 * (1 + 2.0**-23), 1.0039, 1 / 3, 2.0**10], np.float32)
    q = np.zeros((1, 1, 1, 576), BF16)
    out, _ = sparse_decode.attend(q, cache, np.zeros((1, 1, 1), np.int32))
    np.testing.assert_array_equal(out[0, 0, 0, ::128], 1.625 * scales.astype(np.float64))
    rounded, _ = sparse_decode.attend(q, cache, np.zeros((1, 1, 1), np.int32), mode="rounded")
    np.testing.assert_array_equal(rounded, round_to(out, BF16))


# ---- what is never read ----
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("part", ["codes", "scales", "rope"])
@pytest.mark.parametrize("mode", ["exact", "rounded"])
def test_invalid_indices_do_not_read_slot_0(layout, part, mode):
    rng = np.random.default_rng(4)
    q, cache = query(rng, layout), fp8_cache(rng, layout)
    indices = np.where(SOME_INDICES == 0, 1, SOME_INDICES)
    clean = sparse_decode.attend(q, cache, indices, mode=mode)
    getattr(kv_quant.parts_of(cache, layout), part)[0, 0] = {"codes": 0x7F, "rope": np.nan}.get(
        part, np.nan if layout is V32 else 255)
    equal(sparse_decode.attend(q, cache, indices, mode=mode), clean)
    indices = np.where(indices < 0, 0, indices)
    assert np.isnan(sparse_decode.attend(q, cache, indices, mode=mode)[1]).any()  # the NaN is really there


@pytest.mark.parametrize("value", [48, 49, INT_MAX, -2, INT_MIN])
@pytest.mark.parametrize("poison", [np.nan, np.inf])
def test_every_slot_outside_the_cache_is_invalid(value, poison):
    rng = np.random.default_rng(5)
    q, cache = rng.standard_normal((2, 2, 4, 24)), rng.standard_normal((4, 16, 1, 24))
    cache[3] = poison  # behind the cache that is passed
    some = np.where((SOME_INDICES < 0) | (SOME_INDICES >= 48), -1, SOME_INDICES)
    clean = sparse_decode.attend(q, cache[:3], some, 8)
    equal(sparse_decode.attend(q, cache[:3], np.where(some == -1, value, some), 8), clean)


@pytest.mark.parametrize("lengths", [(0, 7), (7, 0), (-5, 3), (INT_MIN, INT_MAX), (0, 0)])
def test_lanes_past_topk_length_do_not_count(lengths):
    rng = np.random.default_rng(6)
    q, cache = query(rng, V32), fp8_cache(rng, V32)
    indices = rng.integers(0, 32, (2, 2, 7)).astype(np.int32)
    kv_quant.parts_of(cache, V32).scales[2] = np.nan
    past = np.arange(7) >= np.array(lengths)[:, None]
    poisoned = np.where(past[:, None], 40, indices)
    got = sparse_decode.attend(q, cache, poisoned, topk_length=np.array(lengths, np.int32))
    equal(got, sparse_decode.attend(q, cache, np.where(past[:, None], -1, indices)))
    for b, length in enumerate(lengths):
        assert length > 0 or (not got[0][b].any() and (got[1][b] == -np.inf).all())


@pytest.mark.parametrize("extra", [False, True])
def test_caches_without_tokens(extra):
    q, indices = np.ones((2, 1, 3, 576), BF16), np.zeros((2, 1, 4), np.int32)
    more = dict(extra_k_cache=np.empty((4, 0, 1, 656), np.uint8), extra_indices=indices) if extra else {}
    for cache in (np.empty((0, 64, 1, 656), np.uint8), np.empty((0, 64, 1, 576), BF16)):
        out, lse = sparse_decode.attend(q, cache, indices, attn_sink=np.zeros(3, np.float32), **more)
        assert not out.any() and (lse == -np.inf).all() and out.shape == (2, 1, 3, 512)
    assert sparse_decode.attend(q[:0], cache, indices[:0])[0].shape == (0, 1, 3, 512)


# ---- rules ----
def test_a_slot_named_twice_is_two_keys():
    rng = np.random.default_rng(7)
    q, cache = query(rng, D512, 1, 1), fp8_cache(rng, D512)
    once, twice = (sparse_decode.attend(q, cache, np.full((1, 1, n), 5, np.int32)) for n in (1, 2))
    np.testing.assert_allclose(twice[0], once[0], rtol=1e-12)
    np.testing.assert_allclose(twice[1], once[1] + math.log(2), rtol=1e-12)


@pytest.mark.parametrize("splits", [1, 2, 8])
@pytest.mark.parametrize("empty_first", [False, True])
def test_a_sink_enters_once_after_the_merge(splits, empty_first):
    rng = np.random.default_rng(8)
    sink = np.array([-np.inf, -5, 0, 20, np.inf], np.float32)
    q, cache = query(rng, V32, h_q=5), fp8_cache(rng, V32)
    indices = rng.integers(0, 48, (2, 2, 16)).astype(np.int32)
    indices[1, 1] = -1  # a row without keys
    if empty_first:
        indices[:, :, :16 // splits] = -1
    plain, lse = sparse_decode.attend(q, cache, indices)
    got = sparse_decode.attend(q, cache, indices, attn_sink=sink)
    np.testing.assert_array_equal(got[1], lse)
    mass = np.exp(lse.transpose(0, 2, 1))[..., None]
    sink_mass = np.exp(sink.astype(np.float64))[:, None]
    expected = np.divide(mass * plain, mass + sink_mass, out=np.zeros_like(plain), where=mass > 0)
    np.testing.assert_allclose(got[0], expected, rtol=1e-12, atol=1e-300)
    assert (got[0][..., 0, :] == plain[..., 0, :]).all() and not got[0][..., 4, :].any() and not got[0][1, 1].any()
    parts = [sparse_decode.attend(q, cache, part) for part in np.split(indices, splits, axis=2)]
    merged = combine.merge(np.stack([o for o, _ in parts]), np.stack([part.transpose(0, 2, 1) for _, part in parts]),
                           attn_sink=sink)
    close((merged[0], merged[1].transpose(0, 2, 1)), got)


def test_chunks_and_strided_arguments(monkeypatch):
    rng = np.random.default_rng(9)
    q, cache = query(rng, V32, batch=2, s_q=2, h_q=4), fp8_cache(rng, V32)
    plain = sparse_decode.attend(q, cache, SOME_INDICES, attn_sink=np.zeros(4, np.float32))
    wide = np.full((2, 2, 9, 600), np.nan, BF16)
    wide[:, :, 1:9:2, 12:588] = q
    layers = np.full((3, 16 * 656 * 3), 0x7F, np.uint8)  # three layers interleaved in each page
    layers[:, 16 * 656:16 * 656 * 2] = cache.reshape(3, -1)
    layer = np.lib.stride_tricks.as_strided(layers[:, 16 * 656:], cache.shape, (layers.strides[0], 656, 656, 1))
    monkeypatch.setitem(sparse_decode._CHUNK_BYTES, "numpy", 1)
    got = sparse_decode.attend(wide[:, :, 1:9:2, 12:588], layer.view(np.int8), np.asfortranarray(SOME_INDICES).astype(
        np.int64), attn_sink=np.zeros(8, np.float32)[::2])
    close(got, plain)


def test_wrong_arguments_are_named():
    q, cache = np.zeros((2, 2, 3, 24)), np.zeros((3, 16, 2, 24))
    with pytest.raises(ValueError, match="mode: got 'fast'"):
        sparse_decode.attend(q, cache, SOME_INDICES, 8, mode="fast")
    with pytest.raises(ValueError, match="h_q: got 3, expected a multiple of h_kv = 2"):
        sparse_decode.attend(q, cache, SOME_INDICES, 8)
    with pytest.raises(ValueError, match="mode: got 'fast'"):
        sparse_decode.attend_paged(q, cache, None, np.zeros(2), 8, mode="fast")


# ---- dense over FP8 ----
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("mode", ["exact", "rounded"])
def test_paged_equals_the_dense_reference_on_dequantized_keys(layout, causal, mode, monkeypatch):
    rng = np.random.default_rng(10)
    lengths = np.array([0, 1, 33, 16, 1000, -4], np.int32)
    q, cache = query(rng, layout, batch=6, s_q=3), fp8_cache(rng, layout, 20, 16, gap=576)
    table = np.full((6, 3), 2147480000, np.int32)
    pages = rng.permutation(20)
    table[1, 0], table[2], table[3, 0], table[4] = pages[0], pages[1:4], pages[4], pages[5:8]
    parts = kv_quant.parts_of(cache, layout)
    parts.codes[pages[3], 1:] = parts.codes[pages[0], 1:] = parts.codes[pages[8:]] = 0x7F
    keys = kv_quant.dequantize(cache, layout, dtype=np.float64)
    keys = round_to(keys, BF16) if mode == "rounded" else keys
    expected = dense_decode.attend(q, keys, table, lengths, causal=causal, mode=mode)
    got = sparse_decode.attend_paged(q, cache, table, lengths, causal=causal, mode=mode)
    equal(got, expected)
    assert np.isfinite(got[0]).all() and not got[0][[0, 5]].any()
    monkeypatch.setitem(sparse_decode._CHUNK_BYTES, "numpy", 1)
    one_by_one = sparse_decode.attend_paged(q, cache, table, lengths, causal=causal, mode=mode)
    np.testing.assert_allclose(one_by_one[0], expected[0], rtol=0 if mode == "rounded" else 1e-12)


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_contiguous_fp8_cache(layout):
    rng = np.random.default_rng(11)
    q, cache = query(rng, layout, batch=3), fp8_cache(rng, layout, 3, 21)
    lengths = np.array([21, 4, 0], np.int32)
    keys = kv_quant.dequantize(cache, layout, dtype=np.float64)
    equal(sparse_decode.attend_paged(q, cache, None, lengths, causal=True),
          dense_decode.attend(q, keys, None, lengths, causal=True))
    out, lse = sparse_decode.attend_paged(q, cache[:, :0], None, lengths)
    assert not out.any() and (lse == -np.inf).all()


def test_paged_fp8_equals_indices():
    rng = np.random.default_rng(12)
    q, cache = query(rng, V32, batch=2), fp8_cache(rng, V32)
    table, lengths = np.array([[2, 0], [1, 7]], np.int32), np.array([30, 9], np.int32)
    slots = np.concatenate([table[:, :1] * 16 + np.arange(16), table[:, 1:] * 16 + np.arange(16)], axis=1)
    indices = np.broadcast_to(slots[:, None], (2, 2, 32)).astype(np.int32)
    close(sparse_decode.attend(q, cache, indices, topk_length=lengths),
          sparse_decode.attend_paged(q, cache, table, lengths))
