"""flashmla_cupy.torch on CPU tensors (the NumPy backend): FlashMLA's names, argument order and conventions."""

from __future__ import annotations

import inspect
import re
import subprocess
import sys

import ml_dtypes
import numpy as np
import pytest

torch = pytest.importorskip("torch")

import flashmla_cupy  # noqa: E402
from flashmla_cupy.kv_format import D512, V32  # noqa: E402
from flashmla_cupy.reference import kv_quant  # noqa: E402
from flashmla_cupy.reference.dense_decode import attend  # noqa: E402
from flashmla_cupy.reference.sched_meta import plan as sched_plan  # noqa: E402
from flashmla_cupy.reference.sparse_decode import attend as sparse_attend  # noqa: E402
from flashmla_cupy.reference.sparse_decode import attend_paged  # noqa: E402
from flashmla_cupy.torch import (  # noqa: E402
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)


def small(batch=3, s_q=2, h_q=16, h_kv=1, dtype=torch.bfloat16, page_size=64):
    generator = torch.Generator().manual_seed(1)
    width = -(-130 // page_size)
    q = torch.randn(batch, s_q, h_q, 576, generator=generator).to(dtype)
    k_cache = torch.randn(batch * width, page_size, h_kv, 576, generator=generator).to(dtype)
    table = torch.randperm(batch * width, generator=generator).to(torch.int32).view(batch, width)
    return q, k_cache, table, torch.tensor([0, 130, 1][:batch], dtype=torch.int32)


def exact(q, k_cache, table, lengths, **options):
    out, lse = attend(q.double().numpy(), k_cache.double().numpy(), table.numpy(), lengths.numpy(), **options)
    return out, np.where(lse == -np.inf, np.inf, lse)


def check(result, expected, dtype):
    out, lse = result
    assert out.dtype == dtype and lse.dtype == torch.float32 and out.device.type == "cpu"
    tolerance = 0.01 if dtype == torch.bfloat16 else 0.002
    np.testing.assert_allclose(out.double().numpy(), expected[0], rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(lse.numpy(), expected[1], rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_metadata_tensors_as_in_older_versions(dtype):
    q, k_cache, table, lengths = small(dtype=dtype)
    metadata, num_splits = get_mla_metadata(lengths, 2 * 16 // 1, 1)
    assert metadata.dtype == num_splits.dtype == torch.int32 and metadata.shape[1] == 8 and num_splits.shape == (4,)
    result = flash_mla_with_kvcache(q, k_cache, table, lengths, 512, metadata, num_splits, 0.05, True)
    expected = exact(q, k_cache, table, lengths, softmax_scale=0.05, causal=True)
    assert np.isposinf(expected[1][0]).all() and np.isposinf(expected[1][2, :, 0]).all()
    check(result, expected, dtype)
    named = flash_mla_with_kvcache(q, k_cache, table, lengths, 512, metadata, num_splits, softmax_scale=0.05,
                                   causal=True)
    assert torch.equal(named[0], result[0]) and torch.equal(named[1], result[1])
    planned_inside = flash_mla_with_kvcache(q, k_cache, table, lengths, 512, None, None, 0.05, True)
    assert torch.equal(planned_inside[0], result[0])


def test_sched_meta_as_in_newer_versions():
    q, k_cache, table, lengths = small()
    sched, nothing = get_mla_metadata()
    assert type(sched) is FlashMLASchedMeta and nothing is None and not sched.have_initialized
    first = flash_mla_with_kvcache(q, k_cache, table, lengths, 512, sched, nothing)
    check(first, exact(q, k_cache, table, lengths), torch.bfloat16)
    config = FlashMLASchedMeta.Config(3, 2, 16, 64, 1, False, False, None, None, None)
    assert sched.have_initialized and sched.config == config
    assert sched.tile_scheduler_metadata.dtype == torch.int32 and sched.num_splits[:2].tolist() == [0, 1]
    plan = sched.tile_scheduler_metadata
    lengths.fill_(77)
    second = flash_mla_with_kvcache(q, k_cache, table, lengths, 512, sched)
    check(second, exact(q, k_cache, table, lengths), torch.bfloat16)
    assert sched.tile_scheduler_metadata is plan

    with pytest.raises(ValueError, match="^tile_scheduler_metadata: got s_q 1, expected 2, h_q 8, expected 16, causal"):
        flash_mla_with_kvcache(q[:, :1, :8], k_cache, table, lengths, 512, sched, causal=True)
    with pytest.raises(TypeError, match="^num_splits: got a value, expected None"):
        flash_mla_with_kvcache(q, k_cache, table, lengths, 512, sched, sched.num_splits)


def test_a_failed_first_use_does_not_fix_the_plan():
    q, k_cache, table, lengths = small()
    sched, _ = get_mla_metadata()
    for error, change in ((ValueError, dict(head_dim_v=576)), (TypeError, dict(cache_seqlens=None)),
                          (ValueError, dict(softmax_scale=-1.0)), (TypeError, dict(cache_seqlens=lengths.float()))):
        with pytest.raises(error, match=f"^{next(iter(change))}: got "):
            arguments = dict(q=q, k_cache=k_cache, block_table=table, cache_seqlens=lengths, head_dim_v=512)
            flash_mla_with_kvcache(**{**arguments, **change}, tile_scheduler_metadata=sched)
        assert not sched.have_initialized and sched.tile_scheduler_metadata is None


def test_views_gradients_and_int64():
    q, k_cache, table, lengths = small()
    expected, _ = flash_mla_with_kvcache(q, k_cache, table, lengths, 512, None)
    wide = torch.zeros(3, 2, 64, 576, dtype=q.dtype)
    wide[:, :, 8:24] = q
    heads_first = k_cache.transpose(1, 2).contiguous().transpose(1, 2)
    out, lse = flash_mla_with_kvcache(wide[:, :, 8:24].requires_grad_(), heads_first, table.long(),
                                      lengths.repeat_interleave(2).long()[::2], 512, None)
    assert torch.equal(out, expected) and not out.requires_grad and not lse.requires_grad


def small_fp8(layout, batch=2, s_q=2, h_q=16, topk=70):
    """q, FP8 cache as uint8, indices with some invalid ones."""
    generator = torch.Generator().manual_seed(2)
    q = torch.randn(batch, s_q, h_q, layout.d_qk, generator=generator).to(torch.bfloat16)
    values = torch.randn(4, 64, 1, layout.d_qk, generator=generator).numpy()
    indices = torch.randint(-9, 265, (batch, s_q, topk), generator=generator, dtype=torch.int32)
    return q, torch.from_numpy(kv_quant.quantize(values, layout)), indices


def as_bf16(q):
    return q.view(torch.int16).numpy().view(ml_dtypes.bfloat16)


@pytest.mark.parametrize("layout", [V32, D512], ids=lambda layout: layout.name)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int8])
def test_sparse_decode(layout, dtype):
    q, cache, indices = small_fp8(layout)
    _, extra, _ = small_fp8(layout)
    sink, lengths = torch.linspace(-5, 20, 16), torch.tensor([70, 0], dtype=torch.int32)
    options = dict(attn_sink=sink, topk_length=lengths, extra_topk_length=torch.tensor([3, -1], dtype=torch.int32))
    sched, nothing = get_mla_metadata()
    result = flash_mla_with_kvcache(q, cache.view(dtype), None, None, 512, sched, nothing, 0.05, False, True, indices,
                                    extra_k_cache=extra.view(dtype), extra_indices_in_kvcache=indices[..., :5],
                                    **options)
    out, lse = sparse_attend(
        as_bf16(q), cache.numpy(), indices.numpy(), softmax_scale=0.05, extra_k_cache=extra.numpy(),
        extra_indices=indices[..., :5].numpy(), **{name: x.numpy() for name, x in options.items()})
    check(result, (out, np.where(lse == -np.inf, np.inf, lse)), torch.bfloat16)
    assert not result[0][1].any() and torch.isposinf(result[1][1]).all()
    assert sched.config == FlashMLASchedMeta.Config(2, 2, 16, 64, 1, False, True, 70, 64, 5)
    expected = sched_plan(np.full(2, 128 + 5), sched.tile_scheduler_metadata.shape[0], overhead_blocks=1)
    assert (sched.tile_scheduler_metadata.numpy() == expected[0]).all()
    again = flash_mla_with_kvcache(q, cache.view(dtype), None, None, 512, sched, None, 0.05, False, True, indices, sink,
                                   extra.view(dtype), indices[..., :5], lengths, options["extra_topk_length"])
    assert torch.equal(again[0], result[0])
    with pytest.raises(ValueError, match="^tile_scheduler_metadata: got topk 69, expected 70, extra_page_block_size"):
        flash_mla_with_kvcache(q, cache, None, None, 512, sched, None, 0.05, False, True, indices[..., 1:])


@pytest.mark.parametrize("layout", [V32, D512], ids=lambda layout: layout.name)
def test_dense_decode_over_an_fp8_cache(layout):
    q, cache, _ = small_fp8(layout)
    table, lengths = torch.tensor([[3, 1], [-1, -1]], dtype=torch.int32), torch.tensor([100, 0], dtype=torch.int32)
    for sched in (None, get_mla_metadata()[0]):
        result = flash_mla_with_kvcache(q, cache.view(torch.float8_e4m3fn), table, lengths, 512, sched, causal=True,
                                        is_fp8_kvcache=True)
        out, lse = attend_paged(as_bf16(q), cache.numpy(), table.numpy(), lengths.numpy(), causal=True)
        check(result, (out, np.where(lse == -np.inf, np.inf, lse)), torch.bfloat16)


def test_sparse_decode_over_a_16_bit_cache():
    q, k_cache, _, _ = small()
    indices = torch.randint(0, 400, (3, 2, 6), dtype=torch.int32)
    result = flash_mla_with_kvcache(q, k_cache, None, None, 512, None, indices=indices)
    check(result, sparse_attend(q.double().numpy(), k_cache.double().numpy(), indices.numpy()), torch.bfloat16)


@pytest.mark.parametrize("change, named, error", [
    (dict(causal=True), "causal", ValueError), (dict(is_fp8_kvcache=False), "is_fp8_kvcache", TypeError),
    (dict(indices=torch.zeros(2, 2, 0, dtype=torch.int32)), "indices", ValueError),
    (dict(indices=torch.zeros(2, 2, 7)), "indices", TypeError),
    (dict(indices=np.zeros((2, 2, 7), np.int32)), "indices", TypeError),
    (dict(k_cache=torch.zeros(4, 64, 1, 576, dtype=torch.uint8)), "k_cache", ValueError),
    (dict(k_cache=torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16)), "k_cache", TypeError),
    (dict(attn_sink=torch.zeros(16, dtype=torch.bfloat16)), "attn_sink", TypeError),
    (dict(topk_length=torch.zeros(3, dtype=torch.int32)), "topk_length", ValueError),
    (dict(extra_k_cache=torch.zeros(4, 64, 1, 656, dtype=torch.uint8)), "extra_indices", TypeError),
    (dict(extra_indices_in_kvcache=torch.zeros(2, 2, 4, dtype=torch.int32)), "extra_indices", TypeError),
    (dict(indices=None, attn_sink=torch.zeros(16)), "attn_sink", TypeError),
])
@pytest.mark.parametrize("with_sched", [False, True])
def test_wrong_sparse_arguments_are_named(change, named, error, with_sched):
    q, cache, indices = small_fp8(V32)
    sched = get_mla_metadata()[0] if with_sched else None
    arguments = dict(q=q, k_cache=cache, block_table=None, cache_seqlens=None, head_dim_v=512, is_fp8_kvcache=True,
                     indices=indices, tile_scheduler_metadata=sched)
    with pytest.raises(error, match=f"^{named}: got .*expected "):
        flash_mla_with_kvcache(**{**arguments, **change})
    assert sched is None or not sched.have_initialized


@pytest.mark.parametrize("argument, value, error", [
    ("q", np.zeros((3, 2, 16, 576), np.float16), TypeError), ("q", torch.zeros(3, 2, 16, 576), TypeError),
    ("q", torch.zeros(3, 16, 576, dtype=torch.bfloat16), ValueError), ("k_cache", None, TypeError),
    ("k_cache", torch.zeros(6, 64, 1, 512, dtype=torch.bfloat16), ValueError),
    ("k_cache", torch.zeros(6, 64, 1, 576, dtype=torch.complex64), TypeError),
    ("block_table", torch.zeros(3, 3), TypeError), ("cache_seqlens", torch.zeros(4, dtype=torch.int32), ValueError),
    ("cache_seqlens", [1, 2, 3], TypeError), ("block_table", np.zeros((3, 3), np.int32), TypeError),
    ("causal", 0.05, TypeError), ("softmax_scale", float("nan"), ValueError), ("head_dim_v", 64, ValueError),
    ("tile_scheduler_metadata", torch.zeros(4, 8, dtype=torch.int32), TypeError),
])
def test_wrong_arguments_are_named(argument, value, error):
    q, k_cache, table, lengths = small()
    arguments = dict(q=q, k_cache=k_cache, block_table=table, cache_seqlens=lengths, head_dim_v=512,
                     tile_scheduler_metadata=None)
    arguments[argument] = value
    named = "num_splits" if argument == "tile_scheduler_metadata" else argument  # which is what is missing then
    with pytest.raises(error, match=f"^{named}: got .*expected "):
        flash_mla_with_kvcache(**arguments)


def test_get_mla_metadata_arguments():
    with pytest.raises(TypeError, match="^cache_seqlens: got an object of type list"):
        get_mla_metadata([1, 2], 128, 1)
    with pytest.raises(ValueError, match="^num_heads_k: got 0"):
        get_mla_metadata(torch.ones(2, dtype=torch.int32), 128, 0)
    metadata, _ = get_mla_metadata(torch.ones(2, dtype=torch.int64), 128, 1, 128, False, None)
    assert metadata.shape == (66, 8)


def test_argument_order_is_flashmlas():
    assert list(inspect.signature(flash_mla_with_kvcache).parameters) == [
        "q", "k_cache", "block_table", "cache_seqlens", "head_dim_v", "tile_scheduler_metadata", "num_splits",
        "softmax_scale", "causal", "is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache",
        "extra_indices_in_kvcache", "topk_length", "extra_topk_length"]
    assert list(inspect.signature(get_mla_metadata).parameters) == [
        "cache_seqlens", "num_q_tokens_per_head_k", "num_heads_k", "num_heads_q", "is_fp8_kvcache", "topk"]


def test_torch_stays_optional():
    code = ("import sys; sys.modules['torch'] = None; import flashmla_cupy; from flashmla_cupy import *; "
            "import flashmla_cupy.ops.dense_decode; print(flashmla_cupy.get_mla_metadata([3], 16, 1)[1])")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and done.stdout.strip() == "[0 1]", done.stderr


@pytest.mark.parametrize("shape", [(0, 1), (2, 0)])
def test_empty_calls(shape):
    batch, s_q = shape
    out, lse = flash_mla_with_kvcache(
        torch.zeros(batch, s_q, 16, 576, dtype=torch.bfloat16), torch.zeros(4, 64, 1, 576, dtype=torch.bfloat16),
        torch.zeros(batch, 2, dtype=torch.int32), torch.ones(batch, dtype=torch.int32), 512, None)
    assert out.shape == (batch, s_q, 16, 512) and lse.shape == (batch, 16, s_q)


def test_a_tensor_with_the_negative_bit():
    sink = torch.complex(torch.zeros(16), torch.linspace(-2, 2, 16)).conj().imag
    assert sink.is_neg()
    arguments = (torch.ones(1, 1, 16, 576, dtype=torch.bfloat16), torch.ones(1, 64, 1, 576, dtype=torch.bfloat16), None,
                 None, 512, None)
    indices = torch.zeros(1, 1, 64, dtype=torch.int32)
    out, _ = flash_mla_with_kvcache(*arguments, indices=indices, attn_sink=sink)
    expected, _ = flash_mla_with_kvcache(*arguments, indices=indices, attn_sink=sink.resolve_neg())
    assert torch.equal(out, expected)


# ---- torch tensors given to the functions of flashmla_cupy itself ----
def native(**changes):
    arguments = dict(q=torch.zeros(1, 1, 4, 576, dtype=torch.float16),
                     k_cache=torch.zeros(1, 64, 1, 576, dtype=torch.float16), block_table=None,
                     cache_seqlens=torch.ones(1, dtype=torch.int32), head_dim_v=512)
    return flashmla_cupy.flash_mla_with_kvcache(**{**arguments, **changes})


@pytest.mark.parametrize("change, reason", [
    (lambda x: x.requires_grad_(), "requires a gradient, expected the result of its detach()"),
    (lambda x: x.to_sparse(), "layout torch.sparse_coo, expected the result of its to_dense()"),
    (lambda x: x.to("meta"), "device type meta"),
    (lambda x: x.float().to_mkldnn(), "expected a CUDA or host array"),
])
@pytest.mark.parametrize("name", ["q", "k_cache"])
def test_tensors_that_are_more_than_memory(name, change, reason):
    shape = (1, 1, 4, 576) if name == "q" else (1, 64, 1, 576)
    with pytest.raises(TypeError, match=f"^{name}: got .*{re.escape(reason)}") as caught:
        native(**{name: change(torch.zeros(shape, dtype=torch.float16))})
    assert "flashmla_cupy.torch" not in str(caught.value)


def test_who_takes_bfloat16_tensors_is_said_where_it_is_true():
    with pytest.raises(TypeError, match="^q: got .*flashmla_cupy.torch takes torch's bfloat16"):
        native(q=torch.zeros(1, 1, 4, 576, dtype=torch.bfloat16))
    with pytest.raises(TypeError, match="^outs: got .*NumPy cannot hold.*, expected a NumPy array$"):
        flashmla_cupy.merge_states(torch.zeros(2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 3))
    out, lse = native()
    assert type(out) is np.ndarray and lse.shape == (1, 4, 1)


def test_sparse_prefill_has_flashmlas_conventions():
    generator = torch.Generator().manual_seed(2)
    q, kv = (torch.randn(shape, generator=generator).bfloat16() for shape in ((4, 3, 576), (20, 1, 576)))
    indices = torch.randint(-3, 23, (4, 1, 9), generator=generator, dtype=torch.int32)
    lengths = torch.tensor([9, 0, 3, 1], dtype=torch.int32)
    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 0.05, 512, None, lengths)
    native = flashmla_cupy.flash_mla_sparse_fwd(
        *(x.float().numpy().astype(ml_dtypes.bfloat16) for x in (q, kv)), indices.numpy(), 0.05,
        topk_length=lengths.numpy())
    assert out.dtype == torch.bfloat16 and np.array_equal(out.float().numpy(), native[0].astype(np.float32))
    assert np.array_equal(max_logits.numpy(), native[1]) and torch.isneginf(max_logits[1]).all()
    assert np.array_equal(lse.numpy(), np.where(np.isneginf(native[2]), np.inf, native[2]))
    assert torch.isposinf(lse[1]).all() and torch.isfinite(lse[0]).all()
    assert list(inspect.signature(flash_mla_sparse_fwd).parameters) == [
        "q", "kv", "indices", "sm_scale", "d_v", "attn_sink", "topk_length"]
    with pytest.raises(TypeError, match="kv: got NumPy"):
        flash_mla_sparse_fwd(q, kv.float().numpy(), indices, 1.0)
    with pytest.raises(ValueError, match="q: got shape"):
        flash_mla_sparse_fwd(q[0], kv, indices, 1.0)
