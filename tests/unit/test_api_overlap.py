# ruff: noqa: F811 (the fixtures)
"""What a call writes must be memory of its own, in NumPy and in CuPy arrays; interleaved views are."""

from __future__ import annotations

import cupy
import numpy as np
import pytest
from fake_gpu import BF16, gpu  # noqa: F401
from test_api_errors import fails, place  # noqa: F401

from flashmla_cupy import dequantize_kv_cache, flash_mla_with_kvcache, quantize_kv_cache
from flashmla_cupy.ops import _overlap, _plans
from flashmla_cupy.ops.dense_decode import mla_workspace_bytes

WRITTEN = {"out": ((2, 1, 16, 512), BF16), "lse": ((2, 16, 1), np.float32),
           "workspace": ((mla_workspace_bytes(2, 1, 16),), np.uint8)}


def over(x, shape, dtype, offset_bytes=0):
    """A C-contiguous array over the memory of `x`, which must be large enough."""
    if isinstance(x, np.ndarray):
        return np.ndarray(shape, dtype, x, offset_bytes)
    return cupy.ndarray(shape, dtype, x.data + offset_bytes)


def call(place, kind):
    """Arguments of a decode call."""
    arguments = dict(q=place.array((2, 1, 16, 576)), head_dim_v=512, **place.metadata(parts=3))
    if kind == "16-bit":
        arguments["k_cache"] = place.array((4, 64, 1, 576))
    else:
        arguments.update(k_cache=place.array((4, 64, 1, 656), np.uint8), is_fp8_kvcache=True)
    if kind != "indices":
        return dict(arguments, block_table=place.array((2, 2), np.int32), cache_seqlens=place.array((2,), np.int32))
    return dict(
        arguments, block_table=None, cache_seqlens=None, indices=place.array((2, 1, 64), np.int32),
        topk_length=place.array((2,), np.int32), attn_sink=place.array((16,), np.float32),
        extra_k_cache=place.array((4, 64, 1, 656), np.uint8), extra_indices=place.array((2, 1, 64), np.int32),
        extra_topk_length=place.array((2,), np.int32))


@pytest.mark.parametrize("kind", ["16-bit", "FP8", "indices"])
@pytest.mark.parametrize("written", list(WRITTEN))
def test_a_result_over_any_other_argument(place, kind, written):
    arguments = call(place, kind)
    for other in [name for name, x in arguments.items() if hasattr(x, "strides")]:
        memory, x = place.array((1 << 25,), np.uint8), arguments[other]
        behind = -(-x.nbytes // 16) * 16
        for offset in (0, behind - 16, behind):
            changed = {other: over(memory, x.shape, x.dtype), written: over(memory, *WRITTEN[written], offset)}
            if offset < behind:
                fails(lambda changed=changed: flash_mla_with_kvcache(**{**arguments, **changed}), written, ValueError,
                      f"overlaps {other},", place.launches)
            else:
                flash_mla_with_kvcache(**{**arguments, **changed})
                getattr(place, "events", []).clear()


@pytest.mark.parametrize("first, second", [("out", "lse"), ("out", "workspace"), ("lse", "workspace")])
def test_two_results_over_each_other(place, first, second):
    memory = place.array((1 << 26,), np.uint8)
    arguments = dict(place.decode(), **{name: over(memory, *WRITTEN[name]) for name in (first, second)})
    fails(lambda: flash_mla_with_kvcache(**arguments), first, ValueError, f"overlaps {second}", place.launches)


def test_interleaved_views_do_not_overlap(place):
    buffer = place.array((2, 1, 16, 1088))  # 576 of q, then 512 of out in each row
    arguments = dict(place.decode(), q=buffer[..., :576], out=buffer[..., 576:])
    flash_mla_with_kvcache(**arguments)
    getattr(place, "events", []).clear()
    arguments["out"] = buffer[..., 568:1080]
    fails(lambda: flash_mla_with_kvcache(**arguments), "out", ValueError, "overlaps q", place.launches)


def test_a_planned_call_with_other_addresses(gpu):
    buffer = gpu.array((1 << 20,), np.uint8)
    arguments = gpu.decode(out=gpu.array(*WRITTEN["out"]), lse=gpu.array(*WRITTEN["lse"]))
    for _ in range(3):
        flash_mla_with_kvcache(**arguments)
    (plan,) = _plans.PLANS.values()
    assert len(plan.overlap.known) == 1
    gpu.events.clear()
    for name in ("q", "out"):
        arguments[name] = over(buffer, arguments[name].shape, BF16)
    fails(lambda: flash_mla_with_kvcache(**arguments), "out", ValueError, "overlaps q", gpu.events)
    assert len(_plans.PLANS) == 1 and len(plan.overlap.known) == 1


def test_known_addresses_are_bounded(gpu, monkeypatch):
    monkeypatch.setattr(_overlap, "_MAX_KNOWN", 4)
    arguments = gpu.decode(lse=gpu.array(*WRITTEN["lse"]))
    for _ in range(10):
        flash_mla_with_kvcache(**dict(arguments, k_cache=gpu.array((40, 64, 1, 576))))
    (plan,) = _plans.PLANS.values()
    assert 0 < len(plan.overlap.known) <= 4


def test_new_results_need_no_look(gpu):
    flash_mla_with_kvcache(**gpu.decode())
    (plan,) = _plans.PLANS.values()
    assert plan.overlap is None


def test_a_result_over_integers_that_are_converted(place):
    lengths = place.array((1 << 15,), np.int64)
    arguments = dict(place.decode(), cache_seqlens=lengths[:2], out=over(lengths, *WRITTEN["out"]))
    fails(lambda: flash_mla_with_kvcache(**arguments), "out", ValueError, "overlaps cache_seqlens", place.launches)


def test_what_takes_long_to_decide_counts_as_overlapping():
    """Views that share nothing, which NumPy takes a minute to find out."""
    def view(offset, shape, strides):
        memory = cupy.cuda.UnownedMemory(0x7F00_0000_0000, 1 << 28, None, 0)
        return cupy.ndarray(shape, np.uint8, cupy.cuda.MemoryPointer(memory, offset), strides)

    q, out = view(0, (1049,) * 3, (36674, 61119, 85569)), view(64023025, (1049, 1049, 1), (12223, 12224, 1))
    with pytest.raises(ValueError, match="^out: got memory that overlaps q"):
        _overlap.check({"q": q, "out": out})


def test_caches_over_their_values(place):
    memory = place.array((1 << 20,), np.uint8)
    kv = over(memory, (3, 64, 1, 576), BF16)
    for first, overlaps in ((0, True), (kv.nbytes - 16, True), (kv.nbytes, False)):
        out = over(memory, (3, 64, 1, 656), np.uint8, first)
        for calls, argument in ((lambda out=out: quantize_kv_cache(kv, out=out), "kv"),
                                (lambda out=out: dequantize_kv_cache(out, out=kv), "cache")):
            if overlaps:
                fails(calls, "out", ValueError, f"overlaps {argument}", place.launches)
            else:
                calls()
