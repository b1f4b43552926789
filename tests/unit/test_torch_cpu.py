"""flashmla_cupy.torch on CPU tensors (the NumPy backend): FlashMLA's names, argument order and conventions."""

from __future__ import annotations

import inspect
import subprocess
import sys

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashmla_cupy.errors import UnsupportedError  # noqa: E402
from flashmla_cupy.reference.dense_decode import attend  # noqa: E402
from flashmla_cupy.torch import FlashMLASchedMeta, flash_mla_with_kvcache, get_mla_metadata  # noqa: E402


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


@pytest.mark.parametrize("name", ["indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache", "topk_length",
                                  "extra_topk_length"])
def test_sparse_arguments_are_refused_by_their_name(name):
    with pytest.raises(UnsupportedError, match=f"^{name}: not supported"):
        flash_mla_with_kvcache(*small(), 512, None, **{name: torch.zeros(2)})
    with pytest.raises(UnsupportedError, match="^is_fp8_kvcache: not supported"):
        flash_mla_with_kvcache(*small(), 512, None, is_fp8_kvcache=True)


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
