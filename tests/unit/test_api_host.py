"""What the NumPy backend refuses, and that it rounds once."""

from __future__ import annotations

import math

import numpy as np
import pytest
from fake_gpu import BF16, gpu  # noqa: F401
from test_api_errors import Host, fails

from flashmla_cupy import (
    flash_mla_with_kvcache,
    get_mla_metadata,
    merge_states,
    mla_workspace_bytes,
    quantize_kv_cache,
)
from flashmla_cupy.ops import _checks, _device
from flashmla_cupy.reference._numerics import cast
from flashmla_cupy.runtime import device


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "gpu_available", lambda: False)
    monkeypatch.setattr("flashmla_cupy.ops.sched_meta.gpu_available", lambda: False)


def test_one_rounding():
    """1 + 2^-8 + 2^-30 lies above the middle of two bfloat16 numbers, and on it after a rounding to float32."""
    value = np.array([1 + 2**-8 + 2**-30, np.inf, -np.inf, np.nan, 0.0])
    np.testing.assert_array_equal(cast(value, BF16).astype(np.float64), [1 + 2**-7, np.inf, -np.inf, np.nan, 0.0])


def test_merge_states_rounds_once():
    outs = np.array([[[1, 1, 1, 1]], [[1 + 2**-7] * 4]], np.float32)
    shares = np.array([0.5 - 2**-20, 0.5 + 2**-20])
    lses = np.log(shares).astype(np.float32)[:, None]
    weights = np.exp(lses.astype(np.float64))
    exact = (outs.astype(np.float64) * (weights / weights.sum(0))[..., None]).sum(0)
    assert 1 + 2**-8 < exact.max() < 1 + 2**-8 + 2**-25, "a float32 in between would lie on the middle"
    out, _ = merge_states(outs.astype(BF16), lses)
    assert (out.astype(np.float64) == 1 + 2**-7).all()


@pytest.mark.parametrize("batch, s_q", [(0, 1), (2, 0), (0, 0)])
@pytest.mark.parametrize("order", ["C", "zero strides"])
def test_empty_outputs_may_be_given(batch, s_q, order):
    arguments = Host().decode(batch=batch, s_q=s_q)
    out, lse = np.empty((batch, s_q, 16, 512), BF16), np.empty((batch, 16, s_q), np.float32)
    if order != "C":
        out = np.lib.stride_tricks.as_strided(out, out.shape, (0, 0, 0, 2))
        lse = np.lib.stride_tricks.as_strided(lse, lse.shape, (0, 0, 0))
    got = flash_mla_with_kvcache(**arguments, out=out, lse=lse)
    assert got[0] is out and got[1] is lse


@pytest.mark.parametrize("page", [-1, 40, 2**31 - 1])
@pytest.mark.parametrize("fp8", [False, True])
def test_pages_that_the_cache_does_not_have(page, fp8):
    arguments = Host().decode()
    arguments["cache_seqlens"][:] = 100, 65
    if fp8:
        arguments.update(k_cache=np.zeros((40, 64, 1, 656), np.uint8), is_fp8_kvcache=True)
    arguments["block_table"][1, 2] = page  # behind the two pages of 65 tokens
    flash_mla_with_kvcache(**arguments)
    arguments["block_table"][1, 1] = page
    fails(lambda: flash_mla_with_kvcache(**arguments), "block_table", ValueError,
          f"page {page} as entry 1 of request 1 (65 tokens), expected pages from 0 to 39")
    arguments["cache_seqlens"][1] = 64
    flash_mla_with_kvcache(**arguments)


@pytest.mark.parametrize("fp8", [False, True])
def test_tokens_over_a_cache_of_no_pages(fp8):
    arguments = Host().decode()
    arguments["cache_seqlens"][:] = 0, 1
    cache = np.zeros((0, 64, 1, 656), np.uint8) if fp8 else arguments["k_cache"][:0]
    arguments.update(k_cache=cache, is_fp8_kvcache=fp8)
    fails(lambda: flash_mla_with_kvcache(**arguments), "block_table", ValueError, "expected no tokens")
    arguments["cache_seqlens"][:] = 0
    out, lse = flash_mla_with_kvcache(**arguments)
    assert not out.any() and np.isneginf(lse).all()


@pytest.mark.filterwarnings("error")
def test_infinite_keys_take_their_course():
    arguments = Host().decode()
    arguments["cache_seqlens"][:] = 3, 1
    arguments["q"][...] = 1
    arguments["k_cache"][:, 1, 0, 0] = np.inf
    out, lse = flash_mla_with_kvcache(**arguments)
    assert not np.isfinite(lse[0]).any() and np.isfinite(lse[1]).all()


@pytest.mark.parametrize("value", [10**400, 1e39, 2.5e38, 1e-46, 1e-300])
def test_scales_that_float32_cannot_hold(value):
    fails(lambda: flash_mla_with_kvcache(**Host().decode(softmax_scale=value)), "softmax_scale", ValueError, "expected")


@pytest.mark.parametrize("value", [1e38, 1e-45])
def test_scales_at_the_end_of_float32(value):
    assert _checks.check_scale("softmax_scale", value, 576) == value
    assert 0 < np.float32(value * math.log2(math.e)) < np.inf


@pytest.mark.parametrize("make, error, text", [
    (lambda n: np.zeros(n // 2, np.uint8), ValueError, "bytes, expected at least"),
    (lambda n: np.zeros(n, np.int32), TypeError, "dtype int32"),
    (lambda n: np.zeros((n // 4, 4), np.uint8), ValueError, "expected 1 axes"),
    (lambda n: np.zeros(2 * n, np.uint8)[::2], ValueError, "contiguous"),
    (lambda n: np.zeros(n + 16, np.uint8)[8:], ValueError, "address"),
    (lambda n: _read_only(np.zeros(n, np.uint8)), ValueError, "read-only"),
])
@pytest.mark.parametrize("kind", ["dense", "sparse", "dense FP8"])
def test_workspace_as_on_a_gpu(make, error, text, kind):
    arguments = Host().decode(workspace=make(mla_workspace_bytes(2, 1, 16)))
    if kind == "sparse":
        arguments.update(indices=np.zeros((2, 1, 65), np.int32))
    elif kind == "dense FP8":
        arguments.update(k_cache=np.zeros((40, 64, 1, 656), np.uint8), is_fp8_kvcache=True)
    fails(lambda: flash_mla_with_kvcache(**arguments), "workspace", error, text)


def _read_only(x):
    x.flags.writeable = False
    return x


@pytest.mark.parametrize("sparse", [False, True])
def test_out_with_a_strided_last_axis(sparse):
    arguments = Host().decode(out=np.zeros((2, 1, 16, 1024), BF16)[..., ::2])
    if sparse:
        arguments.update(indices=np.zeros((2, 1, 64), np.int32))
    fails(lambda: flash_mla_with_kvcache(**arguments), "out", ValueError, "along the last axis")


def test_workspace_bytes_of_heads_that_do_not_divide():
    fails(lambda: mla_workspace_bytes(1, 1, 16, 3), "h_q", ValueError, "16")


@pytest.mark.parametrize("argument", ["q", "k_cache", "block_table", "cache_seqlens", "out"])
def test_masked_arrays(argument):
    arguments = Host().decode(out=np.zeros((2, 1, 16, 512), BF16))
    arguments[argument] = np.ma.masked_array(arguments[argument])
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, TypeError, "masked")


def test_masked_arrays_elsewhere():
    lengths = np.ma.masked_array(np.ones(3, np.int32))
    fails(lambda: get_mla_metadata(lengths, 1, 1), "cache_seqlens", TypeError, "masked")
    outs = np.ma.masked_array(np.ones((2, 3, 4), np.float32))
    fails(lambda: merge_states(outs, outs[..., 0].data), "outs", TypeError, "masked")
    kv = np.ma.masked_array(np.ones((3, 576), np.float32))
    fails(lambda: quantize_kv_cache(kv, page_size=64), "kv", TypeError, "masked")


@pytest.mark.parametrize("by", ["array", "list"])
def test_merge_states_refuses_an_infinite_lse(by):
    outs, lses = np.ones((2, 3, 4), np.float32), np.zeros((2, 3), np.float32)
    lses[1, 2] = np.inf
    arguments = (outs, lses) if by == "array" else (list(outs), list(lses))
    fails(lambda: merge_states(*arguments), "lses", ValueError, "+inf")
    lses[1, 2] = -np.inf
    out, lse = merge_states(outs, lses)
    assert (out == 1).all() and np.isfinite(lse).all()


@pytest.mark.parametrize("bit", ["neg", "conj"])
def test_device_tensors_with_a_pending_sign(gpu, bit):  # noqa: F811
    class Tensor:
        shape, dtype = (2, 1, 16, 576), BF16

        def __dlpack_device__(self):
            return 2, 0

    setattr(Tensor, f"is_{bit}", lambda self: True)
    fails(lambda: flash_mla_with_kvcache(**dict(gpu.decode(), q=Tensor())), "q", TypeError, f"resolve_{bit}()")


WIDE = {  # values of a type, and what they become
    np.int64: ([5, -1, 2**31 - 1, 2**31, 2**32 + 5, 2**63 - 1, -(2**31), -(2**31) - 1, -(2**63)],
               [5, -1, 2**31 - 1, 2**31 - 1, 2**31 - 1, 2**31 - 1, -(2**31), -(2**31), -(2**31)]),
    np.uint64: ([5, 2**31, 2**64 - 1], [5, 2**31 - 1, 2**31 - 1]),
    np.uint32: ([0, 2**31 - 1, 2**32 - 1], [0, 2**31 - 1, 2**31 - 1]),
    np.int16: ([-5, 7], [-5, 7]),
    np.int32: ([-(2**31), 2**31 - 1], [-(2**31), 2**31 - 1]),
}


@pytest.mark.parametrize("dtype", WIDE)
def test_integers_beyond_int32_do_not_wrap(monkeypatch, dtype):
    """On a device; the host refuses them."""
    monkeypatch.setattr(_device.cupy, "clip", np.clip)
    monkeypatch.setattr(_device.cupy, "array", np.array)
    values, expected = WIDE[dtype]
    got = _device.as_int32(np.array(values, dtype))
    assert got.dtype == np.int32 and got.tolist() == expected
