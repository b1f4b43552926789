"""flash_mla_sparse_fwd without a GPU: refusals, the NumPy backend, its reference, selection."""

from __future__ import annotations

import math

import cupy
import ml_dtypes
import numpy as np
import pytest

from flashmla_cupy import UnsupportedError, flash_mla_sparse_fwd
from flashmla_cupy.ops import _device, _select, sparse_prefill
from flashmla_cupy.ops._select import Problem, experimental_kernels, select
from flashmla_cupy.reference import sparse_prefill as reference
from flashmla_cupy.runtime.device import DeviceInfo
from flashmla_cupy.testing import plain_prefill

BF16 = np.dtype(ml_dtypes.bfloat16)
H200 = DeviceInfo("NVIDIA H200", (9, 0), "sm_90a", 132, 232448)


def arrays(s_q=4, h_q=3, s_kv=20, topk=9, d_qk=576, dtype=BF16):
    rng = np.random.default_rng(1)
    shapes = (s_q, h_q, d_qk), (s_kv, 1, d_qk)
    q, kv = (rng.standard_normal(shape).astype(np.float32).astype(dtype) for shape in shapes)
    return dict(q=q, kv=kv, indices=rng.integers(-3, s_kv + 3, (s_q, 1, topk)).astype(np.int32), sm_scale=d_qk**-0.5)


# ---- refusals
@pytest.mark.parametrize(
    "change, error, message",
    [
        ({"q": None}, TypeError, "q: got None, expected an array"),
        ({"q": np.zeros((4, 3, 576), np.float32)}, TypeError, "q: got dtype float32, expected bfloat16"),
        ({"q": np.zeros((4, 576), BF16)}, ValueError, r"q: got shape \(4, 576\), expected 3 axes"),
        ({"q": np.zeros((4, 3, 192), BF16)}, ValueError, "q: got head dimension 192, expected 512 or 576"),
        ({"q": np.zeros((4, 0, 576), BF16)}, ValueError, "q: got 0 heads"),
        ({"kv": None}, TypeError, "kv: got None"),
        ({"kv": np.zeros((20, 576), BF16)}, ValueError, r"kv: got shape \(20, 576\), expected 3 axes"),
        ({"kv": np.zeros((20, 2, 576), BF16)}, ValueError, r"kv: got shape .*expected \(20, 1, 576\)"),
        ({"kv": np.zeros((20, 1, 512), BF16)}, ValueError, r"kv: got shape .*expected \(20, 1, 576\)"),
        ({"kv": np.zeros((20, 1, 576), np.float16)}, TypeError, "kv: got dtype float16, expected bfloat16"),
        ({"indices": None}, TypeError, "indices: got None"),
        ({"indices": np.zeros((4, 1, 0), np.int32)}, ValueError, "indices: got topk 0"),
        ({"indices": np.zeros((4, 2, 9), np.int32)}, ValueError, r"indices: got shape .* expected \(4, 1, topk\)"),
        ({"indices": np.zeros((3, 1, 9), np.int32)}, ValueError, r"indices: got shape \(3, 1, 9\)"),
        ({"indices": np.zeros((4, 1, 9), np.float32)}, TypeError, "indices: got dtype float32"),
        ({"sm_scale": -1.0}, ValueError, "sm_scale: got -1.0, expected a positive"),
        ({"sm_scale": np.ones(2)}, TypeError, "sm_scale: got NumPy float64 array"),
        ({"d_v": 576}, ValueError, "d_v: got 576, expected 512"),
        ({"d_v": True}, TypeError, "d_v: got True, expected an int"),
        ({"attn_sink": np.zeros(4, np.float32)}, ValueError, r"attn_sink: got shape \(4,\), expected \(3,\)"),
        ({"attn_sink": np.zeros(3)}, TypeError, "attn_sink: got dtype float64"),
        ({"topk_length": np.zeros(3, np.int32)}, ValueError, r"topk_length: got shape \(3,\), expected \(4,\)"),
        ({"cu_seqlens_q": [0, 4]}, TypeError, "cu_seqlens_kv: got None, expected .* with cu_seqlens_q"),
        ({"cu_seqlens_kv": [0, 4]}, TypeError, "cu_seqlens_q: got None, expected .* with cu_seqlens_kv"),
        ({"cu_seqlens_q": [0, 4], "cu_seqlens_kv": [0]}, ValueError, "cu_seqlens_kv: got shape"),
        ({"cu_seqlens_q": [], "cu_seqlens_kv": []}, ValueError, "cu_seqlens_q: got no offsets"),
        ({"out": np.zeros((4, 3, 512), np.float32)}, TypeError, "out: got dtype float32"),
        ({"out": np.zeros((4, 3, 576), BF16)}, ValueError, "out: got shape"),
        ({"out": np.zeros((4, 3, 1024), BF16)[..., ::2]}, ValueError, "out: got stride 4 bytes along the last axis"),
        ({"max_logits": np.zeros((3, 4), np.float32)}, ValueError, "max_logits: got shape"),
        ({"lse": np.zeros((4, 3))}, TypeError, "lse: got dtype float64"),
        ({"lse": np.broadcast_to(np.zeros(3, np.float32), (4, 3))}, ValueError, "lse: got a read-only array"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        flash_mla_sparse_fwd(**{**arrays(), **change})


def test_results_must_not_share_memory():
    shared = np.zeros((4, 3), np.float32)
    with pytest.raises(ValueError, match="max_logits: got memory that overlaps lse"):
        flash_mla_sparse_fwd(**arrays(), max_logits=shared, lse=shared)
    given = arrays(d_qk=512)
    with pytest.raises(ValueError, match="out: got memory that overlaps q"):
        flash_mla_sparse_fwd(**given, out=given["q"])


def test_more_work_than_int32_counts_is_refused():
    def long(*shape, dtype=BF16):
        return np.broadcast_to(np.zeros((), dtype), shape)

    tokens = 2**31 - 2**16
    with pytest.raises(ValueError, match=f"q: got {tokens} tokens of 65 heads, expected at most {tokens // 2}"):
        flash_mla_sparse_fwd(long(tokens, 65, 576), long(5, 1, 576), long(tokens, 1, 1, dtype=np.int32), 1.0)


# ---- NumPy backend and reference
@pytest.mark.parametrize("dtype, d_qk", [(BF16, 576), (BF16, 512), (np.dtype(np.float16), 576)])
def test_numpy_backend_equals_the_definition(dtype, d_qk):
    given = arrays(dtype=dtype, d_qk=d_qk)
    options = dict(attn_sink=np.array([-math.inf, 0.5, math.inf], np.float32),
                   topk_length=np.array([9, 4, -2, 100], np.int32))
    out, max_logits, lse = flash_mla_sparse_fwd(**given, **options)
    expected = plain_prefill.attend(*given.values(), 512, **options)
    assert out.dtype == dtype and max_logits.dtype == lse.dtype == np.float32
    np.testing.assert_allclose(out.astype(np.float64), expected[0], rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(max_logits, expected[1], rtol=1e-6)
    np.testing.assert_allclose(lse, expected[2], rtol=1e-6)
    assert not out[:, 2].any() and not out[2].any()  # an infinite sink, no index
    assert np.isneginf(lse[2]).all() and np.isneginf(max_logits[2]).all() and np.isfinite(lse[[0, 1, 3]]).all()


def test_sink_divides_the_output():
    given = arrays()
    plain, _, lse = flash_mla_sparse_fwd(**given)
    sink = np.array([1.0, -2.0, 3.0], np.float32)
    out, _, same_lse = flash_mla_sparse_fwd(**given, attn_sink=sink)
    assert (lse == same_lse).all()
    factor = 1 / (1 + np.exp(sink - lse))
    np.testing.assert_allclose(out.astype(float), plain.astype(float) * factor[..., None], rtol=2**-7)


def test_requests_are_calls_of_their_own():
    given = arrays(s_q=7, s_kv=30)
    cu_q, cu_kv = np.array([1, 1, 4, 6]), np.array([0, 10, 17, 30])
    results = flash_mla_sparse_fwd(**given, cu_seqlens_q=cu_q, cu_seqlens_kv=cu_kv)
    for request in range(3):
        tokens, rows = slice(*cu_q[request : request + 2]), slice(*cu_kv[request : request + 2])
        alone = flash_mla_sparse_fwd(given["q"][tokens], given["kv"][rows], given["indices"][tokens], given["sm_scale"])
        for got, expected in zip(results, alone, strict=True):
            assert np.array_equal(got[tokens], expected)
    out, max_logits, lse = results
    for outside in (0, 6):  # tokens of no request
        assert not out[outside].any() and np.isneginf(lse[outside]).all() and np.isneginf(max_logits[outside]).all()


def test_unused_rows_are_not_read_and_indices_may_repeat():
    given = arrays(s_kv=6)
    given["indices"] = np.array([[[2, 2, 5, -1]]] * 4)
    expected = flash_mla_sparse_fwd(**given)
    given["kv"][[0, 1, 3, 4]] = np.nan
    for got, right in zip(flash_mla_sparse_fwd(**given), expected, strict=True):
        assert np.array_equal(got, right)
    once = flash_mla_sparse_fwd(**{**given, "indices": given["indices"][..., 1:]})
    assert (once[2] < expected[2]).all()


@pytest.mark.parametrize("change", [{"s_kv": 0}, {"s_q": 0}])
def test_nothing_to_attend(change):
    sizes = {"s_q": 4, "s_kv": 20, **change}
    given = dict(q=np.ones((sizes["s_q"], 3, 576), BF16), kv=np.ones((sizes["s_kv"], 1, 576), BF16),
                 indices=np.zeros((sizes["s_q"], 5), np.int32), sm_scale=None)
    out, max_logits, lse = flash_mla_sparse_fwd(**given)
    assert out.shape == (sizes["s_q"], 3, 512) and not out.any()
    assert max_logits.shape == lse.shape == (sizes["s_q"], 3)
    assert np.isneginf(lse).all() and np.isneginf(max_logits).all()


def test_results_go_where_they_are_asked_for():
    given = arrays()
    expected = flash_mla_sparse_fwd(**given)
    out, max_logits = np.empty((3, 4, 512), BF16).transpose(1, 0, 2), np.empty((4, 6), np.float32)[:, ::2]
    lse = np.empty((3, 4), np.float32).T
    results = flash_mla_sparse_fwd(**given, out=out, max_logits=max_logits, lse=lse)
    assert all(x is y for x, y in zip(results, (out, max_logits, lse), strict=True))
    assert all(np.array_equal(x, y) for x, y in zip(results, expected, strict=True))


def test_rounded_reference_is_near_the_exact_one():
    given = arrays(topk=40)
    exact, rounded = (reference.attend(*given.values(), mode=mode) for mode in ("exact", "rounded"))
    assert 0 < abs(exact[0] - rounded[0]).max() < 0.02
    assert np.array_equal(exact[1], rounded[1]) and np.array_equal(exact[2], rounded[2])
    with pytest.raises(ValueError, match="mode: got 'fast'"):
        reference.attend(*given.values(), mode="fast")


# ---- selection
def test_kernels_are_for_hopper():
    specs = [spec for spec in _select.all_specs() if spec.op == "sparse_prefill"]
    assert [".".join(spec.tag) for spec in specs] == ["bf16.d576", "bf16.d512"]
    problem = Problem("sparse_prefill", "bfloat16", 576, 512)
    with experimental_kernels():
        assert select(problem, H200) == specs[0]
        with pytest.raises(UnsupportedError, match="got float16 with 576, expected bfloat16 with 576"):
            select(Problem("sparse_prefill", "float16", 576, 512), H200)
        with pytest.raises(UnsupportedError, match="compute capability: got 8.0"):
            select(problem, DeviceInfo("A100", (8, 0), "sm_80", 108, 166912))


@pytest.mark.parametrize("name, stride, copied", [
    ("kv", 1152, False), ("kv", -1152, False), ("kv", 2**31 - 16, False), ("kv", 2**31, True), ("kv", -(2**31), True),
    ("kv", 1160, True), ("q", 2**31, False)])
def test_rows_too_far_apart_for_the_kernel_are_copied(monkeypatch, name, stride, copied):
    """The kernel has the bytes between rows of kv as int32."""
    memory = cupy.cuda.UnownedMemory(1 << 40, 1 << 40, None, 0)
    x = cupy.ndarray((3, 1, 576), np.dtype(ml_dtypes.bfloat16), cupy.cuda.MemoryPointer(memory, 1 << 35),
                     (stride, 1152, 2))
    monkeypatch.setattr(_device, "contiguous", lambda x: "a copy")
    assert sparse_prefill._staged(name, x, 0) is ("a copy" if copied else x)


@pytest.mark.parametrize("name, offsets", [
    ("cu_seqlens_q", [0, 2, 1]), ("cu_seqlens_q", [0, 9]), ("cu_seqlens_kv", [4, 1]), ("cu_seqlens_kv", [0, 99]),
    ("cu_seqlens_kv", [-3, 2])])
def test_offsets_that_contradict_are_refused_on_the_host(name, offsets):
    other = {"cu_seqlens_q": [0] * len(offsets), "cu_seqlens_kv": [0] * len(offsets)}
    q, kv = np.ones((2, 1, 512), np.float16), np.ones((5, 1, 512), np.float16)
    with pytest.raises(ValueError, match=f"^{name}: got .*, expected offsets that do not decrease"):
        flash_mla_sparse_fwd(q, kv, [[0, 1], [2, 3]], None, **{**other, name: offsets})


def test_a_sink_of_nan_shows():
    q, kv = np.ones((2, 1, 512), np.float16), np.ones((5, 1, 512), np.float16)
    out, _, lse = flash_mla_sparse_fwd(q, kv, [[0, 1], [2, 3]], None, attn_sink=np.array([np.nan], np.float32))
    assert np.isnan(out).all() and np.isfinite(lse).all()
