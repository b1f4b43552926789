"""The public API on a GPU: streams, graphs, other libraries' arrays, odd arguments, several devices."""

from __future__ import annotations

import dataclasses

import cupy as cp
import ml_dtypes
import numpy as np
import pytest

from flashmla_cupy import CaptureError, flash_mla_with_kvcache, get_mla_metadata, merge_states
from flashmla_cupy.ops import _plans
from flashmla_cupy.ops.dense_decode import mla_workspace_bytes
from flashmla_cupy.reference import sched_meta as reference_plan
from flashmla_cupy.reference.dense_decode import attend
from flashmla_cupy.runtime import device as runtime_device
from flashmla_cupy.testing import inputs
from flashmla_cupy.testing.cases import Case
from flashmla_cupy.testing.compare import compare

pytestmark = pytest.mark.gpu
BF16 = np.dtype(ml_dtypes.bfloat16)
PLAN = ("tile_scheduler_metadata", "num_splits")
_REPEATS = 2000
CASE = Case((300, 64, 0, 4000), s_q=2, h_q=64, causal=True, seed=7)  # whole, one block, empty and split requests


@pytest.fixture(autouse=True)
def only_on_hopper():
    if runtime_device.info().compute_capability[0] != 9:
        pytest.skip("dense decode needs compute capability 9.x")


def call(x, *plan, case=CASE, **change):
    arguments = dict(q=x.q, k_cache=x.k_cache, block_table=x.block_table, cache_seqlens=x.cache_seqlens)
    keywords = {name: change.pop(name) for name in list(change) if name not in arguments}
    return flash_mla_with_kvcache(*{**arguments, **change}.values(), 512, *plan, case.causal,
                                  **keywords) if plan else flash_mla_with_kvcache(
        *{**arguments, **change}.values(), 512, causal=case.causal, **keywords)


def plan_of(x, case=CASE):
    return get_mla_metadata(x.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv, case.h_q, False, None)


def check(out, lse, x, lengths=None, case=CASE, table=None):
    """out and lse against the reference for the given lengths."""
    lengths = x.cache_seqlens if lengths is None else cp.asarray(lengths, np.int32)
    table = x.block_table if table is None else table
    options = dict(causal=case.causal, softmax_scale=case.softmax_scale)
    references = [attend(x.q, x.k_cache, table, lengths, mode=mode, **options) for mode in ("exact", "rounded")]
    errors = compare(out, lse, *references, cp)
    assert errors.message is None, errors.message


def same_bits(a, b):
    """Whether two (out, lse) pairs have the same bits."""
    out, lse = a[0].view(np.uint16) == b[0].view(np.uint16), a[1].view(np.int32) == b[1].view(np.int32)
    return bool(out.all()) and bool(lse.all())


@pytest.fixture
def x():
    return inputs.build(CASE, cp)


def test_the_call_forms_of_the_documentation(x):
    q, k_cache, block_table, cache_seqlens = x.q, x.k_cache, x.block_table, x.cache_seqlens
    s_q, h_q, h_kv, is_fp8, topk, causal, is_fp8_kvcache, indices = 2, 64, 1, False, None, True, False, None
    tile_scheduler_metadata, num_splits = get_mla_metadata(cache_seqlens, s_q * h_q // h_kv, h_kv, h_q, is_fp8, topk)
    out, lse = flash_mla_with_kvcache(q, k_cache, block_table, cache_seqlens, 512,
                                      tile_scheduler_metadata, num_splits, causal, is_fp8_kvcache, indices)
    check(out, lse, x)
    expected = reference_plan.plan(cache_seqlens.get(), tile_scheduler_metadata.shape[0])
    assert (tile_scheduler_metadata.get() == expected[0]).all() and (num_splits.get() == expected[1]).all()
    assert same_bits((out, lse), call(x))  # planned inside


def test_workspace_and_outputs_given(x):
    expected = call(x)
    workspace = cp.full(mla_workspace_bytes(4, 2, 64), 0xFF, np.uint8)
    out, lse = call(x, out=x.out.array, lse=x.lse.array, workspace=workspace)
    assert same_bits((out, lse), expected) and same_bits((x.out.array, x.lse.array), expected)
    assert same_bits(call(x, *plan_of(x), workspace=workspace.view(np.float32)), expected)


@pytest.mark.parametrize("case", [
    dataclasses.replace(CASE, lengths=(0,) * 16, s_q=1, h_q=16, spare_pages=0),
    dataclasses.replace(CASE, lengths=(0,) * 3, page_size=0, spare_pages=0), dataclasses.replace(CASE, lengths=(0, 0)),
])
def test_nothing_to_attend(case):
    x = inputs.build(case, cp)
    out, lse = call(x, out=x.out.array, lse=x.lse.array, case=case)
    assert bool((out.view(np.uint16) == 0).all()) and bool((lse == -np.inf).all())
    assert x.out.outside_untouched() and x.lse.outside_untouched()


def test_empty_batch():
    out, lse = flash_mla_with_kvcache(cp.empty((0, 1, 16, 576), BF16), cp.empty((4, 64, 1, 576), BF16),
                                      cp.empty((0, 4), np.int32), cp.empty(0, np.int32), 512)
    metadata, num_splits = get_mla_metadata(cp.empty(0, np.int32), 16, 1)
    assert out.shape == (0, 1, 16, 512) and lse.shape == (0, 16, 1)
    assert not metadata.any() and num_splits.tolist() == [0]


# ---- case 17: metadata of other lengths ----
@pytest.mark.parametrize("made_for", [(64, 64, 64, 64), (0, 0, 0, 0), (10**6, 1, 2, 3), (-5, 4000, 0, 65), (4096,) * 4])
def test_stale_metadata(x, made_for):
    plan = get_mla_metadata(cp.asarray(np.array(made_for, np.int32)), 128, 1)
    check(*call(x, *plan), x)


def test_lengths_beyond_the_table_are_clipped(x):
    table = x.block_table[:, :1]  # one KV block a request: no combine launch, though lengths say otherwise
    out, lse = call(x, block_table=table)
    check(out, lse, x, np.minimum(CASE.lengths, 64), table=table)
    check(*call(x, *plan_of(x), block_table=table), x, np.minimum(CASE.lengths, 64), table=table)


# ---- case 18 and graphs ----
@pytest.mark.parametrize("start", [(0, 0, 0, 0), (4000, 4000, 4000, 4000)])
@pytest.mark.parametrize("form", ["planned inside", "metadata in the graph", "everything given"])
def test_graph_follows_lengths_written_in_place(start, form):
    case = dataclasses.replace(CASE, lengths=(4000,) * 4)
    x = inputs.build(case, cp)
    lengths = cp.asarray(np.array(start, np.int32))
    given = dict(out=x.out.array, lse=x.lse.array)
    if form == "everything given":
        given["workspace"] = cp.empty(mla_workspace_bytes(4, 2, 64), np.uint8)
    keep = []

    def body():
        plan = () if form == "planned inside" else get_mla_metadata(lengths, 128, 1)
        keep.append(plan)  # arrays made in a capture must live as long as the graph
        call(x, *plan, cache_seqlens=lengths, **given)

    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        body()
        stream.synchronize()
        stream.begin_capture()
        body()
        graph = stream.end_capture()
        for now in ((0, 0, 0, 0), (1, 64, 65, 4000), (4000, 4000, 4000, 4000), (3, 0, 4000, 0)):
            lengths[...] = cp.asarray(np.array(now, np.int32))
            x.out.refill(), x.lse.refill()
            clobber = cp.full(96 << 20, 0xFF, np.uint8)  # would land in workspace memory that went back to the pool
            graph.launch(stream)
            stream.synchronize()
            check(x.out.array, x.lse.array, x, now, case)
            assert bool((clobber == 0xFF).all()), "the graph wrote into memory that it does not own"
            assert x.out.outside_untouched() and x.lse.outside_untouched()
            del clobber


def test_capture_converts_device_integers_but_refuses_host_ones(x):
    x_lengths = x.cache_seqlens.astype(np.int64)
    out, lse = x.out.array, x.lse.array
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        call(x, cache_seqlens=x_lengths, out=out, lse=lse)
        stream.synchronize()
        stream.begin_capture()
        try:
            with pytest.raises(ValueError, match="^cache_seqlens: got a host array while its stream is captured"):
                call(x, cache_seqlens=x.cache_seqlens.shape[0] * [3], out=out, lse=lse)
            call(x, cache_seqlens=x_lengths, out=out, lse=lse)
        finally:
            graph = stream.end_capture()
        x_lengths[...] = cp.asarray([1, 2, 0, 4])
        graph.launch(stream)
        stream.synchronize()
    check(out, lse, x, [1, 2, 0, 4])


def test_a_first_call_inside_a_capture_says_what_to_do(x):
    from flashmla_cupy.runtime import compile as kernel_compile

    kernel_compile.forget(), _plans.clear_plans()
    stream = cp.cuda.Stream(non_blocking=True)
    cp.cuda.Device().synchronize()
    with stream:
        stream.begin_capture()
        try:
            with pytest.raises(CaptureError, match="cache warmup"):
                call(x, out=x.out.array, lse=x.lse.array)
        finally:
            stream.end_capture()
    check(*call(x), x)


# ---- streams and case 19 ----
def test_the_current_stream_is_used(x):
    """A slow kernel on the stream holds the lengths back; a call on any other stream would read the old ones."""
    lengths = cp.zeros(4, np.int32)
    call(x, cache_seqlens=lengths)
    slow = cp.RawKernel("extern \"C\" __global__ void wait(long long cycles) {"
                        " const long long begin = clock64(); while (clock64() - begin < cycles); }", "wait")
    for stream in (cp.cuda.Stream(non_blocking=True), cp.cuda.Stream(), cp.cuda.Stream.null):
        lengths[...] = 0
        cp.cuda.Device().synchronize()
        with stream:
            slow((1,), (1,), (np.int64(20_000_000),))
            lengths[...] = x.cache_seqlens
            out, lse = call(x, *get_mla_metadata(lengths, 128, 1), cache_seqlens=lengths)
        stream.synchronize()
        check(out, lse, x)


@pytest.mark.parametrize("lengths", [(64, 1, 63, 20), (4000, 4000, 100, 3)])
def test_repeated_calls_on_the_same_buffers_give_the_same_bits(lengths):
    case = dataclasses.replace(CASE, lengths=lengths)
    x = inputs.build(case, cp)
    workspace = cp.empty(mla_workspace_bytes(4, 2, 64), np.uint8)
    plan = plan_of(x, case)
    expected = [a.copy() for a in call(x, *plan, case=case)]
    wrong = cp.zeros(1, np.int64)
    out, lse = x.out.array, x.lse.array
    for i in range(_REPEATS):
        call(x, *(plan if i % 2 else ()), case=case, out=out, lse=lse, workspace=workspace)
        wrong += (out.view(np.uint16) != expected[0].view(np.uint16)).sum()
        wrong += (lse.view(np.int32) != expected[1].view(np.int32)).sum()
        out.view(np.uint16).fill(0x7FFF)
    assert int(wrong[0]) == 0


def test_calls_in_two_streams_at_once_do_not_share_memory(x):
    expected = call(x)
    streams = [cp.cuda.Stream(non_blocking=True) for _ in range(2)]
    cp.cuda.Device().synchronize()
    results = []
    for _ in range(50):
        for stream in streams:
            with stream:
                results.append(call(x))
    cp.cuda.Device().synchronize()
    assert all(same_bits(result, expected) for result in results)


# ---- case 22: views ----
@pytest.mark.parametrize("layout", ["head_view", "padded", "swapped"])
@pytest.mark.parametrize("cache_layout", ["dense", "interleaved", "offset", "token_padded", "heads_first"])
def test_views_of_larger_buffers(layout, cache_layout):
    case = dataclasses.replace(CASE, h_q=8, q_layout=layout, out_layout=layout, cache_layout=cache_layout)
    x = inputs.build(case, cp)
    out, lse = call(x, case=case, out=x.out.array, lse=x.lse.array)
    check(out, lse, x, case=case)
    assert x.out.outside_untouched() and x.lse.outside_untouched()


def test_an_out_off_the_16_byte_grid(x):
    expected, _ = call(x)
    for build in (lambda b: b[8 + 1:8 + 1 + expected.size].reshape(expected.shape),  # base
                  lambda b: b[:4 * 2 * 64 * 516].reshape(4, 2, 64, 516)[..., 3:515]):  # strides and base
        buffer = cp.full(4 * 2 * 64 * 516 + 64, 0x7FFF, np.uint16)
        guard = buffer.copy()
        out, _ = call(x, out=build(buffer).view(BF16))
        assert bool((build(buffer) == expected.view(np.uint16)).all())
        build(guard)[...] = expected.view(np.uint16)
        assert bool((buffer == guard).all()), "something outside the view was written"


def test_odd_queries_are_copied(x):
    expected = call(x)
    flat = cp.empty(x.q.size + 8, BF16)
    shifted = flat[1:1 + x.q.size].reshape(x.q.shape)  # two bytes off
    shifted[...] = x.q
    padded = cp.empty((*x.q.shape[:3], 580), BF16)
    padded[..., 2:578] = x.q
    for q in (shifted, padded[..., 2:578], cp.asfortranarray(x.q), x.q.repeat(2, axis=3)[..., ::2]):
        assert same_bits(call(x, q=q), expected)


# ---- case 23: integer arguments ----
@pytest.mark.parametrize("change", [
    lambda x: dict(cache_seqlens=x.cache_seqlens.get()), lambda x: dict(cache_seqlens=x.cache_seqlens.tolist()),
    lambda x: dict(cache_seqlens=x.cache_seqlens.astype(np.int64)),
    lambda x: dict(cache_seqlens=cp.repeat(x.cache_seqlens, 2)[::2]),
    lambda x: dict(cache_seqlens=x.cache_seqlens[::-1].copy()[::-1]),
    lambda x: dict(block_table=x.block_table.get(), cache_seqlens=x.cache_seqlens.get()),
    lambda x: dict(block_table=x.block_table.astype(np.int64)),
    lambda x: dict(block_table=cp.asfortranarray(x.block_table)),
    lambda x: dict(block_table=cp.concatenate([x.block_table, cp.full((4, 9), 2147480000, np.int32)], 1)[:, :63]),
    lambda x: dict(zip(PLAN, (m.get() for m in plan_of(x)), strict=True)),
    lambda x: dict(zip(PLAN, (m.astype(np.int64) for m in plan_of(x)), strict=True)),
], ids=range(11))
def test_integers_of_other_kinds(x, change):
    expected = call(x)
    for _ in range(2):
        assert same_bits(call(x, **change(x)), expected)


@pytest.mark.parametrize("dtype", [np.int64, np.uint64])
def test_lengths_beyond_int32_are_those_of_a_full_cache(x, dtype):
    full, wide = cp.full_like(x.cache_seqlens, 2**31 - 1), cp.full(x.cache_seqlens.shape, 2**32 + 5, dtype)
    assert same_bits(call(x, cache_seqlens=wide), call(x, cache_seqlens=full))


def test_clear_errors_for_what_cannot_be_used(x):
    for name, change in (("q", x.q.astype(np.float32)), ("k_cache", x.k_cache[..., ::-1]), ("k_cache", x.k_cache[::-1]),
                         ("k_cache", x.k_cache.get())):
        with pytest.raises((TypeError, ValueError), match=f"^{name}: got .*expected "):
            call(x, **{name: change})
    buffer = cp.empty(x.k_cache.size + 8, BF16)
    with pytest.raises(ValueError, match="^k_cache: got address .*multiple of 16 bytes"):
        call(x, k_cache=buffer[1:1 + x.k_cache.size].reshape(x.k_cache.shape))


# ---- merge_states ----
@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16])
@pytest.mark.parametrize("n, rows, d_v", [(1, 3, 4), (2, 100, 512), (33, 7, 128), (161, 5, 516), (257, 600, 64)])
def test_merge_states_equals_the_numpy_backend(n, rows, d_v, dtype):
    rng = np.random.default_rng(n)
    outs = rng.standard_normal((n, rows, d_v)).astype(dtype)
    lses = rng.standard_normal((n, rows)).astype(np.float32) * 5
    lses[rng.random((n, rows)) < 0.2] = -np.inf
    lses[:, 0] = -np.inf
    outs[lses == -np.inf] = np.nan
    expected = merge_states(outs, lses)
    for got in (merge_states(cp.asarray(outs), cp.asarray(lses)),
                merge_states([cp.asarray(o) for o in outs], [cp.asarray(lse) for lse in lses])):
        assert got[0].dtype == dtype
        tolerance = 1e-5 if dtype == np.float32 else 2e-2
        values, wanted = got[0].get().astype(np.float64), expected[0].astype(np.float64)
        np.testing.assert_allclose(values, wanted, rtol=tolerance, atol=tolerance)
        np.testing.assert_allclose(got[1].get(), expected[1], rtol=2e-5, atol=5e-5)


def test_merge_of_two_halves_of_the_cache(x):
    cut = 128
    halves = [call(x, block_table=table, cache_seqlens=lengths, case=dataclasses.replace(CASE, causal=False))
              for table, lengths in ((x.block_table[:, :2], cp.minimum(x.cache_seqlens, cut)),
                                     (x.block_table[:, 2:], cp.maximum(x.cache_seqlens - cut, 0)))]
    out, lse = merge_states(*zip(*halves, strict=True))
    whole_out, whole_lse = call(x, case=dataclasses.replace(CASE, causal=False))
    cp.testing.assert_allclose(lse, whole_lse, rtol=2e-5, atol=5e-5)
    cp.testing.assert_allclose(out.astype(np.float32), whole_out.astype(np.float32), rtol=2e-2, atol=1e-2)


# ---- other libraries, several devices ----
def test_arrays_by_the_array_interface_only(x):
    class Interface:
        def __init__(self, array):
            self.__cuda_array_interface__ = array.__cuda_array_interface__
            self.owner = array

    expected = call(x)
    wrapped = {name: Interface(getattr(x, name)) for name in ("block_table", "cache_seqlens")}
    assert same_bits(call(x, **wrapped), expected)


def test_torch_tensors_by_dlpack(x):
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    expected = call(x)
    names = ("q", "k_cache", "block_table", "cache_seqlens")
    tensors = {name: torch.from_dlpack(getattr(x, name)) for name in names}
    assert tensors["q"].dtype == torch.bfloat16 and tensors["q"].data_ptr() == x.q.data.ptr
    torch.cuda.synchronize()
    out, lse = call(x, **tensors)
    assert type(out) is cp.ndarray and same_bits((out, lse), expected)
    target = torch.empty(out.shape, dtype=torch.bfloat16, device="cuda")
    out, _ = call(x, **tensors, out=target)
    cp.cuda.Device().synchronize()
    assert out.data.ptr == target.data_ptr() and bool((out.view(np.uint16) == expected[0].view(np.uint16)).all())


@pytest.mark.skipif("cp.cuda.runtime.getDeviceCount() < 2" if runtime_device.gpu_available() else "True",
                    reason="needs two GPUs")
def test_the_device_of_q_is_used(x):
    expected = [a.get() for a in call(x)]
    with cp.cuda.Device(1):
        y = inputs.build(CASE, cp)
        cp.cuda.Device().synchronize()
    assert cp.cuda.runtime.getDevice() == 0
    metadata = get_mla_metadata(y.cache_seqlens, 128, 1)
    out, lse = call(y, *metadata)
    assert cp.cuda.runtime.getDevice() == 0
    assert out.data.device_id == lse.data.device_id == metadata[0].data.device_id == 1
    with cp.cuda.Device(1):
        cp.cuda.Device().synchronize()
        assert (out.get().view(np.uint16) == expected[0].view(np.uint16)).all() and (lse.get() == expected[1]).all()
    with pytest.raises(ValueError, match="^k_cache: got an array on device 0, expected device 1 as q"):
        call(y, k_cache=x.k_cache)
