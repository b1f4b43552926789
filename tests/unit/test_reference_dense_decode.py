"""The references against loops in plain Python, element by element."""

from __future__ import annotations

import math

import ml_dtypes
import numpy as np
import pytest

from flashmla_cupy.reference import dense_decode
from flashmla_cupy.reference._numerics import round_to

BF16 = np.dtype(ml_dtypes.bfloat16)


def brute_force(q, k_cache, block_table, lengths, d_v, scale, causal, cast=lambda x: x):
    """One number at a time; `cast` rounds weights and outputs."""
    batch, s_q, h_q, d = q.shape
    group = h_q // k_cache.shape[2]
    out, lse = np.zeros((batch, s_q, h_q, d_v)), np.full((batch, h_q, s_q), -math.inf)
    for b in range(batch):
        for i in range(s_q):
            count = max(0, lengths[b] - s_q + i + 1 if causal else lengths[b])
            for h in range(h_q):
                if count == 0:
                    continue
                keys = []
                for t in range(count):
                    page, slot = (b, t) if block_table is None else divmod(t, k_cache.shape[1])
                    page = page if block_table is None else block_table[b, page]
                    keys.append([float(x) for x in k_cache[page, slot, h // group]])
                query = [float(x) for x in q[b, i, h]]
                scores = [scale * math.fsum(x * y for x, y in zip(query, key, strict=True)) for key in keys]
                top = max(scores)
                weights = [math.exp(s - top) for s in scores]
                total = math.fsum(weights)
                lse[b, h, i] = top + math.log(total)
                rounded = [cast(w) for w in weights]
                for d_out in range(d_v):
                    value = math.fsum(w * key[d_out] for w, key in zip(rounded, keys, strict=True)) / total
                    out[b, i, h, d_out] = cast(value)
    return out, lse


def make(rng, lengths, *, s_q=1, h_q=4, h_kv=1, d=24, page_size=16, dtype=BF16, poison=np.nan):
    """Random call with every unused slot and page poisoned and every unused table entry out of range."""
    batch, width = len(lengths), max(1, -(-max(lengths) // page_size)) + 2
    pages = batch * width + 1
    k_cache = np.full((pages, page_size, h_kv, d), poison, dtype)
    table = rng.choice([-1, 2**31 - 1, pages, 2147480000], (batch, width)).astype(np.int32)
    free = list(rng.permutation(pages))
    for b, length in enumerate(lengths):
        for begin in range(0, length, page_size):
            table[b, begin // page_size] = page = free.pop()
            n = min(page_size, length - begin)
            k_cache[page, :n] = rng.standard_normal((n, h_kv, d)).astype(dtype)
    q = rng.standard_normal((batch, s_q, h_q, d)).astype(dtype)
    return q, k_cache, table, np.array(lengths, np.int32)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32, np.float64], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("s_q", "h_q", "h_kv"), [(1, 3, 1), (2, 6, 3), (3, 4, 2)])
def test_paged_matches_brute_force(dtype, causal, s_q, h_q, h_kv):
    lengths = (0, 1, 2, 15, 16, 17, 2)
    q, k_cache, table, seqlens = make(np.random.default_rng(1), lengths, s_q=s_q, h_q=h_q, h_kv=h_kv, dtype=dtype)
    out, lse = dense_decode.attend(q, k_cache, table, seqlens, 8, softmax_scale=0.3, causal=causal)
    expected = brute_force(q, k_cache, table, lengths, 8, 0.3, causal)
    np.testing.assert_allclose(out, expected[0], rtol=1e-12, atol=1e-14)
    np.testing.assert_allclose(lse, expected[1], rtol=1e-12, atol=1e-14)
    assert out.dtype == lse.dtype == np.float64


@pytest.mark.parametrize("dtype", [BF16, np.float16], ids=str)
def test_rounded_mode_rounds_weights_and_output(dtype):
    lengths = (5, 33, 64)
    q, k_cache, table, seqlens = make(np.random.default_rng(2), lengths, dtype=dtype)
    out, lse = dense_decode.attend(q, k_cache, table, seqlens, 8, softmax_scale=1.0, mode="rounded")
    cast = lambda x: float(round_to(np.float64(x), dtype))  # noqa: E731
    expected, expected_lse = brute_force(q, k_cache, table, lengths, 8, 1.0, False, cast)
    np.testing.assert_array_equal(out, out.astype(dtype).astype(np.float64))
    # A last-bit difference of the sum in float64 may cross a rounding boundary, hardly ever.
    assert (out != expected).mean() < 0.01
    np.testing.assert_allclose(out, expected, rtol=2.0**-7, atol=1e-7)
    np.testing.assert_allclose(lse, expected_lse, rtol=1e-12)


def test_rounded_scores_are_off_by_their_vectors_norms():
    q, k_cache, table, seqlens = make(np.random.default_rng(12), (1, 1, 1, 1), h_q=8)
    exact, off = (dense_decode.attend(q, k_cache, table, seqlens, 8, softmax_scale=0.5, mode=mode)
                  for mode in ("exact", "rounded scores"))
    keys = k_cache[table[:, 0], 0].astype(np.float64)  # (batch, h_kv, d_qk)
    norms = np.linalg.norm(q.astype(np.float64), axis=-1)[:, 0] * np.linalg.norm(keys, axis=-1).repeat(8, axis=1)
    error = abs(off[1] - exact[1])[..., 0] / (2.0**-13 * 0.5 * norms)  # of one key, the lse is the score
    assert 0.5 < error.max() <= 1 and (error > 0).all()
    np.testing.assert_allclose(off[0], exact[0], rtol=1e-12)


def test_contiguous_cache_equals_paged():
    lengths = (7, 0, 16, 3)
    q, k_cache, table, seqlens = make(np.random.default_rng(3), lengths, h_q=4, h_kv=2)
    contiguous = np.full((4, 20, 2, 24), np.nan, BF16)
    for b, length in enumerate(lengths):
        contiguous[b, :length] = k_cache[table[b, 0], :length] if length else 0
    paged = dense_decode.attend(q, k_cache, table, seqlens, 16)
    flat = dense_decode.attend(q, contiguous, None, seqlens, 16)
    np.testing.assert_array_equal(paged[0], flat[0])
    np.testing.assert_array_equal(paged[1], flat[1])


def test_default_scale_and_mla_shape():
    q, k_cache, table, seqlens = make(np.random.default_rng(4), (65,), h_q=2, d=576, page_size=64)
    got = dense_decode.attend(q, k_cache, table, seqlens)
    expected = brute_force(q, k_cache, table, (65,), 512, 576**-0.5, False)
    np.testing.assert_allclose(got[0], expected[0], rtol=1e-11, atol=1e-13)
    np.testing.assert_allclose(got[1], expected[1], rtol=1e-12)


@pytest.mark.parametrize("poison", [np.nan, np.inf, 0.0])
def test_unused_memory_never_matters(poison):
    q, k_cache, table, seqlens = make(np.random.default_rng(5), (13, 0, 31), s_q=2, poison=poison)
    clean = dense_decode.attend(*make(np.random.default_rng(5), (13, 0, 31), s_q=2, poison=1.0), 8, causal=True)
    got = dense_decode.attend(q, k_cache, table, seqlens, 8, causal=True)
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_array_equal(got[1], clean[1])


def test_all_empty_without_a_cache():
    q = np.ones((16, 1, 16, 576), BF16)
    cache, table = np.empty((0, 64, 1, 576), BF16), np.empty((16, 0), np.int32)
    out, lse = dense_decode.attend(q, cache, table, np.zeros(16, np.int32))
    assert not out.any() and (lse == -np.inf).all()


def test_causal_rows_before_the_first_key_are_empty():
    q, k_cache, table, seqlens = make(np.random.default_rng(6), (2,), s_q=5)
    out, lse = dense_decode.attend(q, k_cache, table, seqlens, 8, causal=True)
    assert not out[0, :3].any() and (lse[0, :, :3] == -np.inf).all()
    assert np.isfinite(lse[0, :, 3:]).all()
    np.testing.assert_allclose(out[0, 3], np.broadcast_to(k_cache[table[0, 0], 0, 0, :8].astype(float), (4, 8)))


def test_lengths_are_clipped_to_what_the_table_holds():
    q, k_cache, table, _ = make(np.random.default_rng(7), (32, 32))
    full = dense_decode.attend(q, k_cache, table[:, :2], np.array([32, 0]), 8)
    got = dense_decode.attend(q, k_cache, table[:, :2], np.array([1000, -3]), 8)
    np.testing.assert_array_equal(got[0], full[0])
    np.testing.assert_array_equal(got[1], full[1])


def test_strided_views_and_chunks(monkeypatch):
    q, k_cache, table, seqlens = make(np.random.default_rng(8), (20, 20, 20, 5), h_q=4, h_kv=2)
    wide = np.full((4, 1, 9, 30), np.nan, BF16)
    wide[:, :, 1:9:2, 3:27] = q
    pool = np.full((2 * len(k_cache), 20, 2, 24), np.nan, BF16)
    pool[::2, 2:18] = k_cache
    plain = dense_decode.attend(q, k_cache, table, seqlens, 8)
    monkeypatch.setitem(dense_decode._CHUNK_BYTES, "numpy", 1)
    got = dense_decode.attend(wide[:, :, 1:9:2, 3:27], pool[::2, 2:18], table, seqlens, 8)
    np.testing.assert_allclose(got[0], plain[0], rtol=1e-13)
    np.testing.assert_allclose(got[1], plain[1], rtol=1e-13)


def test_wrong_arguments_are_named():
    q, k_cache, table, seqlens = make(np.random.default_rng(9), (3,), h_q=3)
    with pytest.raises(ValueError, match="mode: got 'fast'"):
        dense_decode.attend(q, k_cache, table, seqlens, 8, mode="fast")
    with pytest.raises(ValueError, match="h_q: got 2, expected a multiple of h_kv = 3"):
        dense_decode.attend(q[:, :, :2], np.repeat(k_cache, 3, axis=2), table, seqlens, 8)


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=str)
def test_round_to_returns_to_the_nearest_number(dtype):
    rng = np.random.default_rng(10)
    bits = {"bfloat16": np.uint16, "float16": np.uint16, "float32": np.uint32}[np.dtype(dtype).name]
    numbers = rng.integers(0, np.iinfo(bits).max, 20000, endpoint=True).astype(bits).view(dtype)
    with np.errstate(invalid="ignore"):  # signalling NaNs
        exact = numbers.astype(np.float64)
    exact = exact[np.isfinite(exact)]
    np.testing.assert_array_equal(round_to(exact, dtype), exact)
    # Nudged by less than half a unit in the last place: back to the same number.
    smallest = {"bfloat16": 2.0**-133, "float16": 2.0**-24, "float32": 2.0**-149}[np.dtype(dtype).name]
    np.testing.assert_array_equal(round_to(exact + 0.25 * smallest, dtype), exact)


def test_round_to_ties_overflow_and_single_rounding():
    bf16 = lambda x: float(round_to(np.array(x), BF16))  # noqa: E731
    assert bf16(1 + 2.0**-8) == 1.0  # tie to even
    assert bf16(1 + 3 * 2.0**-8) == 1 + 2.0**-6
    assert bf16(1 + 2.0**-8 + 2.0**-40) == 1 + 2.0**-7  # float32 in between would make it a tie, and 1.0
    largest = float(ml_dtypes.finfo(BF16).max)
    assert bf16(-largest * (1 + 2.0**-10)) == -largest and bf16(largest * (1 + 2.0**-8)) == math.inf
    assert bf16(1e39) == math.inf and bf16(-1e39) == -math.inf
    assert bf16(-math.inf) == -math.inf and math.isnan(bf16(math.nan)) and bf16(0.0) == 0.0
    assert float(round_to(np.array(65519.0), np.float16)) == 65504.0
    assert float(round_to(np.array(65520.0), np.float16)) == math.inf
    assert float(round_to(np.array(2.0**-25), np.float16)) == 0.0
    assert float(round_to(np.array(1.5 * 2.0**-24), np.float16)) == 2.0**-23
    with pytest.raises(TypeError, match="dtype"):
        round_to(np.array(1.0), np.int32)
