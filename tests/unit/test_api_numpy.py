"""The public API on NumPy arrays: every call works, with the right results, where there is no GPU."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

import flashmla_cupy
from flashmla_cupy import flash_mla_with_kvcache, get_mla_metadata, merge_states
from flashmla_cupy.reference import sched_meta as reference_plan
from flashmla_cupy.reference._numerics import cast
from flashmla_cupy.reference.dense_decode import attend
from flashmla_cupy.testing import cases, inputs

BF16 = np.dtype(ml_dtypes.bfloat16)


def small(batch=2, s_q=2, h_q=16, h_kv=1, d_qk=576, dtype=BF16, page_size=64, seed=0):
    """q, k_cache, block_table, cache_seqlens with 130 and fewer tokens a request."""
    rng = np.random.default_rng(seed)
    width = -(-130 // page_size)
    q = rng.standard_normal((batch, s_q, h_q, d_qk)).astype(dtype)
    k_cache = rng.standard_normal((batch * width, page_size, h_kv, d_qk)).astype(dtype)
    table = rng.permutation(batch * width).astype(np.int32).reshape(batch, width)
    return q, k_cache, table, rng.integers(1, 131, batch).astype(np.int32)


def test_the_call_forms_of_the_documentation():
    q, k_cache, block_table, cache_seqlens = small()
    s_q, h_q, h_kv, is_fp8, topk, causal, is_fp8_kvcache, indices = 2, 16, 1, False, None, True, False, None
    tile_scheduler_metadata, num_splits = get_mla_metadata(cache_seqlens, s_q * h_q // h_kv, h_kv, h_q, is_fp8, topk)
    out, lse = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512,
                                      tile_scheduler_metadata, num_splits, causal, is_fp8_kvcache, indices)
    assert type(out) is type(lse) is np.ndarray
    assert out.shape == (2, 2, 16, 512) and out.dtype == BF16 and lse.shape == (2, 16, 2) and lse.dtype == np.float32
    exact_out, exact_lse = attend(q, k_cache, block_table, cache_seqlens, causal=True)
    assert (out == cast(exact_out, BF16)).all()
    np.testing.assert_allclose(lse, exact_lse, rtol=1e-6)
    again = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512, causal=True)
    assert (again[0] == out).all() and (again[1] == lse).all()


@pytest.mark.parametrize("case", cases.smoke(), ids=lambda case: case.name)
def test_smoke_cases_equal_the_reference(case):
    x = inputs.build(case)
    plan = get_mla_metadata(x.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv) if case.with_metadata else ()
    out, lse = flash_mla_with_kvcache(x.q, x.k_cache, x.block_table, x.cache_seqlens, 512, *plan, causal=case.causal,
                                      softmax_scale=case.softmax_scale, out=x.out.array, lse=x.lse.array)
    exact_out, exact_lse = attend(x.q, x.k_cache, x.block_table, x.cache_seqlens, softmax_scale=case.softmax_scale,
                                  causal=case.causal)
    assert (out == cast(exact_out, out.dtype)).all() and (lse == exact_lse.astype(np.float32)).all()
    assert (x.out.array == out).all() and x.out.outside_untouched() and x.lse.outside_untouched()


def test_an_empty_pool_and_empty_batches():
    q, _, _, _ = small(batch=16, s_q=1)
    out, lse = flash_mla_with_kvcache(q, np.empty((0, 64, 1, 576), BF16), np.empty((16, 0), np.int32),
                                      np.zeros(16, np.int32), 512)
    assert (out == 0).all() and (lse == -np.inf).all()
    for shape in ((0, 1, 16, 576), (0, 0, 16, 576)):
        out, lse = flash_mla_with_kvcache(np.empty(shape, BF16), np.empty((3, 64, 1, 576), BF16),
                                          np.empty((0, 4), np.int32), np.empty(0, np.int32), 512)
        assert out.shape == (0, shape[1], 16, 512) and lse.shape == (0, 16, shape[1])


def test_lists_int64_and_strided_integers():
    q, k_cache, table, lengths = small(batch=3)
    expected, _ = flash_mla_with_kvcache(q, k_cache, table, lengths, 512)
    doubled = np.repeat(lengths, 2)
    for some_table, some_lengths in (
            (table.tolist(), lengths.tolist()), (table.astype(np.int64), lengths.astype(np.int64)),
            (np.asfortranarray(table), doubled[::2]), (table.astype(np.uint8), tuple(lengths))):
        out, _ = flash_mla_with_kvcache(q, k_cache, some_table, some_lengths, 512)
        assert (out == expected).all()


def test_metadata_equal_the_reference_plan():
    lengths = [0, 1, 64, 5000, 100]
    metadata, num_splits = get_mla_metadata(lengths, 128, 1, 128)
    expected = reference_plan.plan(np.array(lengths), 66)
    assert (metadata == expected[0]).all() and (num_splits == expected[1]).all()
    assert metadata.dtype == num_splits.dtype == np.int32 and metadata.shape == (66, 8)
    assert (get_mla_metadata(lengths, 128, 1, topk=2048)[1] == reference_plan.plan(lengths, 66, topk=2048)[1]).all()


@pytest.mark.parametrize("scale", [None, 0.01, 1.0, 0.1352337788608801])
@pytest.mark.parametrize("dtype", [BF16, np.float16])
def test_two_halves_merge_to_the_whole(scale, dtype):
    q, k_cache, _, _ = small(batch=2, s_q=3, dtype=dtype)
    k_cache = k_cache[:4].reshape(2, 128, 1, 576)
    whole_out, whole_lse = flash_mla_with_kvcache(q, k_cache, None, [128, 70], 512, softmax_scale=scale)
    halves = [flash_mla_with_kvcache(q, part, None, lengths, 512, softmax_scale=scale)
              for part, lengths in ((k_cache[:, :70], [70, 70]), (k_cache[:, 70:], [58, 0]))]
    out, lse = merge_states([out for out, _ in halves], [lse for _, lse in halves])
    assert out.dtype == dtype and lse.dtype == np.float32 and lse.shape == (2, 16, 3)
    np.testing.assert_allclose(lse, whole_lse, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.astype(np.float64), whole_out.astype(np.float64), rtol=0.03, atol=0.03)
    stacked = merge_states(np.stack([out for out, _ in halves]), np.stack([lse for _, lse in halves]))
    assert (stacked[0] == out).all() and (stacked[1] == lse).all()


@pytest.mark.parametrize("n", [1, 32, 33, 160, 161, 192, 256, 257])
def test_merge_any_number_of_partial_results(n):
    rng = np.random.default_rng(n)
    scores, values = rng.standard_normal((n, 5)), rng.standard_normal((n, 5, 8)).astype(np.float32)
    out, lse = merge_states(values, scores.astype(np.float32))
    weights = np.exp(scores) / np.exp(scores).sum(0)
    np.testing.assert_allclose(out, (weights[..., None] * values).sum(0), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(lse, np.log(np.exp(scores).sum(0)), rtol=1e-5, atol=1e-6)


def test_merge_of_empty_results():
    outs = np.full((2, 3, 4), np.nan, np.float32)
    out, lse = merge_states(outs, np.full((2, 3), -np.inf, np.float32))
    assert (out == 0).all() and (lse == -np.inf).all()


@pytest.mark.parametrize("scalars", [False, True])
@pytest.mark.parametrize("stacked", [False, True])
def test_results_of_one_axis_have_an_lse_without_axes(stacked, scalars):
    outs, lses = np.float32([[1, 2, 3, 4], [5, 6, 7, 8]]), np.float32([0, 0])
    given = lses if stacked else list(lses) if scalars else [np.array(x) for x in lses]
    out, lse = merge_states(outs if stacked else list(outs), given)
    assert out.tolist() == [3, 4, 5, 6] and type(lse) is np.ndarray
    assert lse.shape == () and lse.dtype == np.float32 and lse == np.float32(np.log(2))


class Exporter:
    """A host array of a library that knows no more than DLPack."""

    def __init__(self, array):
        self._array = array

    def __dlpack__(self, **arguments):
        return self._array.__dlpack__(**arguments)

    def __dlpack_device__(self):
        return self._array.__dlpack_device__()


class NumPyExporter(Exporter):
    def __array__(self, dtype=None, copy=None):
        return self._array


@pytest.mark.parametrize("other", [Exporter, NumPyExporter])
def test_other_host_arrays(other):
    q, k_cache, table, lengths = small(dtype=np.float16)
    expected, _ = flash_mla_with_kvcache(q, k_cache, table, lengths, 512)
    out, lse = flash_mla_with_kvcache(other(q), other(k_cache), other(table), other(lengths), 512)
    assert type(out) is np.ndarray and (out == expected).all()
    outs, lses = np.ones((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    assert (merge_states(other(outs), other(lses))[0] == 1).all()
    assert (get_mla_metadata(other(lengths), 32, 1)[0] == get_mla_metadata(lengths, 32, 1)[0]).all()


@pytest.mark.parametrize("method", ["__dlpack__", "__dlpack_device__"])
def test_an_array_that_cannot_be_shared_is_named(method):
    class Broken(Exporter):
        pass

    def refuse(self, **arguments):
        raise BufferError("not today")

    setattr(Broken, method, refuse)
    q, k_cache, table, lengths = small(dtype=np.float16)
    with pytest.raises(TypeError, match="^k_cache: got .*not today.*, expected ") as caught:
        flash_mla_with_kvcache(q, Broken(k_cache), table, lengths, 512)
    assert type(caught.value.__cause__) is BufferError


@pytest.mark.filterwarnings("error")
def test_values_beyond_float32_and_signalling_nans_take_their_course():
    """A log-sum-exp that float32 does not hold is infinite, without a word of NumPy's."""
    q, k_cache = np.full((1, 1, 4, 576), 3e38, BF16), np.full((1, 64, 1, 576), 3e38, BF16)
    _, lse = flash_mla_with_kvcache(q, k_cache, None, [3], 512)
    assert (lse == np.inf).all()
    k_cache.view(np.uint16)[...] = 0x7F81
    out, lse = flash_mla_with_kvcache(q, k_cache, None, [3], 512)
    assert np.isnan(out.astype(np.float32)).all() and np.isnan(lse).all()
    merge_states(k_cache, np.zeros((1, 64, 1), np.float32))
    cache = flashmla_cupy.quantize_kv_cache(np.full((1, 64, 1, 576), 3e38, np.float32))
    _, lse = flash_mla_with_kvcache(q, cache, None, [3], 512, is_fp8_kvcache=True)
    assert (lse == np.inf).all()
    _, lse = flash_mla_with_kvcache(q, cache, None, None, 512, is_fp8_kvcache=True, indices=np.zeros((1, 1, 4), int))
    assert (lse == np.inf).all()
    cache[...] = np.random.default_rng(0).integers(0, 256, cache.shape)
    flash_mla_with_kvcache(q, cache, None, [64], 512, is_fp8_kvcache=True)


def test_weights_too_small_for_a_float_are_zeros():
    """Also where NumPy has been told to raise."""
    rng = np.random.default_rng(0)
    q, kv = (10 * rng.standard_normal(shape) for shape in ((1, 4, 576), (1, 64, 1, 576)))
    q, kv = q.astype(BF16), kv.astype(BF16)
    cache, indices = flashmla_cupy.quantize_kv_cache(kv), np.arange(64)[None, None]
    with np.errstate(all="raise"):
        merge_states(np.ones((2, 3, 4), np.float32), np.array([[0, 0, 0], [2000, 0, -2000]], np.float32))
        flash_mla_with_kvcache(q[None], kv, None, [64], 512, softmax_scale=1.0)
        flash_mla_with_kvcache(q[None], cache, None, None, 512, is_fp8_kvcache=True, indices=indices, softmax_scale=1.0)
        flashmla_cupy.flash_mla_sparse_fwd(q, kv[0], indices, 1.0, attn_sink=np.zeros(4, np.float32))


def test_what_int32_indices_cannot_name_is_refused():
    """And indices beyond int32 name nothing."""
    q, row = np.ones((1, 1, 576), BF16), np.ones((1, 1, 576), BF16)
    kv = np.broadcast_to(row, (2**31 - 1, 1, 576))
    lse = flashmla_cupy.flash_mla_sparse_fwd(q, kv, np.array([[[2**31 - 2, 2**31 - 1, 2**31, 2**62]]]), None)[2]
    np.testing.assert_allclose(lse, 24.0)
    with pytest.raises(ValueError, match="^kv: got 2147483648 tokens, expected at most 2147483647"):
        flashmla_cupy.flash_mla_sparse_fwd(q, np.broadcast_to(row, (2**31, 1, 576)), np.zeros((1, 1, 1), int), None)
    page = flashmla_cupy.quantize_kv_cache(np.ones((1, 64, 1, 576), np.float32))
    large, indices = np.broadcast_to(page, (2**25, 64, 1, 656)), np.zeros((1, 1, 1), int)
    with pytest.raises(ValueError, match="^k_cache: got 2147483648 tokens, expected at most 2147483647"):
        flash_mla_with_kvcache(q[None], large, None, None, 512, is_fp8_kvcache=True, indices=indices)
    with pytest.raises(ValueError, match="^extra_k_cache: got 2147483648 tokens"):
        flash_mla_with_kvcache(q[None], page, None, None, 512, is_fp8_kvcache=True, indices=indices,
                               extra_k_cache=large, extra_indices=indices)


def test_public_names():
    for name in ("flash_mla_with_kvcache", "get_mla_metadata", "merge_states", "UnsupportedError", "CaptureError"):
        assert name in dir(flashmla_cupy) and callable(getattr(flashmla_cupy, name))
