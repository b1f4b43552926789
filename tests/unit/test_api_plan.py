# ruff: noqa: F811 (the gpu fixture)
"""What the public API launches: kernels, grids, parameters, copies. On a fake GPU, so it runs everywhere."""

from __future__ import annotations

import math
import struct
import sys
import time

import cupy
import numpy as np
import pytest
from fake_gpu import BF16, STREAM, FakeGpu, gpu  # noqa: F401

from flashmla_cupy import flash_mla_with_kvcache, get_mla_metadata, merge_states
from flashmla_cupy.ops import _device, _plans, combine, sched_meta
from flashmla_cupy.ops.dense_decode import mla_workspace_bytes
from flashmla_cupy.runtime import params

DENSE = "dense_decode.sm90"
DECODE, COMBINE, SCHED = f"{DENSE}.bf16.d576", "combine.sm80.bf16.half", "sched_meta.sm80"


def names(launches):
    return [launch.name for launch in launches]


def test_a_call_without_metadata_launches_plan_decode_combine(gpu):
    arguments = gpu.decode(batch=3, s_q=2, h_q=64, width=20)
    out, lse = flash_mla_with_kvcache(**arguments)
    plan, decode, merge = gpu.take()
    assert names([plan, decode, merge]) == [SCHED, DECODE, COMBINE]
    assert all(launch.pdl and launch.stream == STREAM for launch in (plan, decode, merge))
    assert out.shape == (3, 2, 64, 512) and out.dtype == BF16 and lse.shape == (3, 64, 2) and lse.dtype == np.float32

    parts = 132 // 2  # 128 rows are two blocks of 64
    assert plan.grid == (1, 1, 1) and decode.grid == (2, 1, parts) and merge.grid == (32, 3, 1)  # 4 warps a row
    p = plan.params
    assert (p["batch"], p["num_sm_parts"], p["block_size"], p["overhead_blocks"]) == (3, parts, 64, 2)
    assert p["fixed_seqlen"] == -1
    d, q = decode.params, arguments["q"]
    assert d["q"] == q.data.ptr and d["out"] == out.data.ptr and d["lse"] == lse.data.ptr
    assert d["cache_seqlens"] == p["cache_seqlens"] == arguments["cache_seqlens"].data.ptr
    assert d["block_table"] == arguments["block_table"].data.ptr and d["block_table_stride"] == 20
    assert (d["q_stride_batch"], d["q_stride_token"], d["q_stride_head"]) == (2 * 64 * 576, 64 * 576, 576)
    assert (d["out_stride_batch"], d["out_stride_token"], d["out_stride_head"]) == (2 * 64 * 512, 64 * 512, 512)
    assert (d["lse_stride_batch"], d["lse_stride_head"], d["lse_stride_token"]) == (128, 2, 1)
    assert (d["batch"], d["s_q"], d["heads_per_kv"], d["h_kv"], d["num_sm_parts"]) == (3, 2, 64, 1, parts)
    assert (d["causal"], d["page_size"], d["box_tokens"], d["max_seqlen"]) == (0, 64, 64, 1280)
    assert d["scale_log2"] == pytest.approx(576**-0.5 * math.log2(math.e), rel=1e-6)
    c = merge.params
    for name in ("o_partial", "lse_partial", "metadata", "out", "lse", "out_stride_head", "lse_stride_head", "batch",
                 "s_q", "heads_per_kv", "h_kv", "num_sm_parts"):
        assert c[name] == d[name], name
    assert (c["attn_sink"], c["d_v"], c["lse_in_scale"], c["warps_per_row_shift"]) == (0, 512, 1.0, 2)
    assert (c["heads_per_kv_magic"], c["heads_per_kv_shift"]) == (d["heads_per_kv_magic"], d["heads_per_kv_shift"])
    assert p["metadata"] == d["metadata"]

    # The workspace holds everything without overlap, each part on a 16-byte boundary.
    o_bytes, rows = 2 * parts * 128 * 512 * 2, 2 * parts * 128 * 4
    spans = [(d["o_partial"], o_bytes), (d["lse_partial"], 3 * rows), (p["cost_prefix"], 4 * 8),
             (p["metadata"], parts * 32), (p["num_splits"], 4 * 4)]
    assert all(int(start) % 16 == 0 for start, _ in spans)
    ordered = sorted((int(start), int(start) + size) for start, size in spans)
    assert all(end <= start for (_, end), (start, _) in zip(ordered, ordered[1:], strict=False))
    assert ordered[-1][1] - ordered[0][0] <= mla_workspace_bytes(3, 2, 64)


def test_given_metadata_are_used_as_they_are(gpu):
    arguments = gpu.decode(**gpu.metadata())
    flash_mla_with_kvcache(**arguments)
    decode, merge = gpu.take()
    assert names([decode, merge]) == [DECODE, f"{COMBINE}.quarters"]
    assert decode.params["metadata"] == arguments["tile_scheduler_metadata"].data.ptr
    assert merge.params["metadata"] == arguments["tile_scheduler_metadata"].data.ptr
    assert decode.grid == (1, 1, 132) and merge.grid == (4 * 16, len(arguments["cache_seqlens"]), 1)
    assert (merge.params["warps_per_row_shift"], merge.params["column_groups_shift"]) == (4, 2)
    (partial_map,) = gpu.partial_maps
    assert partial_map == dict(ptr=decode.params["o_partial"], dtype_name="float16", shape=(512, 16, 2 * 132),
                               strides_bytes=(1024, 16 * 1024), box=(64, 16, 1))
    assert bytes(decode.params["partial_map"]) == b"\1" * 128


@pytest.mark.parametrize("sizes, parts", [({}, 1), ({"s_q": 128, "h_q": 128}, None), ({"width": 1}, 132),
                                          ({"width": 1}, None)], ids=str)
def test_one_launch_where_the_shape_rules_out_splits(gpu, sizes, parts):
    """One part (of 256 blocks of rows, or as the metadata say), or one KV block a request."""
    flash_mla_with_kvcache(**gpu.decode(**sizes, **({} if parts is None else gpu.metadata(parts=parts))))
    (decode,) = gpu.take()
    assert decode.name == DECODE and decode.grid[2] == (parts or (132 if sizes.get("width") else 1))
    assert decode.params["metadata"] == decode.params["o_partial"] == 0 and not any(decode.params["partial_map"])


@pytest.mark.parametrize("page_size, width, box", [(16, 4, 16), (32, 3, 32), (64, 2, 64), (128, 2, 64), (256, 1, 64)])
def test_tensor_map_of_a_paged_cache(gpu, page_size, width, box):
    arguments = gpu.decode(page_size=page_size, width=width, pages=7, h_kv=2)
    flash_mla_with_kvcache(**arguments)
    (arguments_of_map,) = gpu.maps
    assert arguments_of_map == dict(
        ptr=arguments["k_cache"].data.ptr, dtype_name="bfloat16", shape=(64, page_size, 9, 2, 7),
        strides_bytes=(2 * 1152, 128, 1152, page_size * 2 * 1152), box=(64, box, 1, 1, 1))
    (decode,) = (launch for launch in gpu.launches if launch.name == DECODE)
    assert (decode.params["page_size"], decode.params["box_tokens"]) == (page_size, box)
    assert decode.params["max_seqlen"] == page_size * width and bytes(decode.params["k_map"]) == b"\1" * 128


@pytest.mark.parametrize("s_k", [1, 20, 64, 1000])
def test_tensor_map_of_a_contiguous_cache(gpu, s_k):
    arguments = gpu.decode(batch=3, page_size=0)
    arguments["k_cache"] = gpu.array((3, s_k, 1, 576))
    flash_mla_with_kvcache(**arguments)
    (tensor_map,) = gpu.maps
    assert tensor_map["shape"] == (64, s_k, 9, 1, 3) and tensor_map["box"] == (64, 64, 1, 1, 1)
    assert tensor_map["strides_bytes"][0] == 1152 and tensor_map["strides_bytes"][3] == s_k * 1152
    (decode,) = (launch for launch in gpu.launches if launch.name == DECODE)
    assert (decode.params["page_size"], decode.params["box_tokens"], decode.params["max_seqlen"]) == (s_k, 64, s_k)
    assert decode.params["block_table"] == 0


def test_axes_of_one_element_may_have_any_stride(gpu):
    arguments = gpu.decode(batch=1, page_size=0, width=1)
    arguments["k_cache"] = gpu.array((1, 64, 1, 576), strides=(14, 1152, 6, 2))
    arguments["q"] = gpu.array((1, 1, 16, 576), strides=(2, 10, 1152, 2))
    flash_mla_with_kvcache(**arguments)
    assert all(stride > 0 and stride % 16 == 0 for stride in gpu.maps[0]["strides_bytes"])
    assert gpu.launches[0].params["q"] == arguments["q"].data.ptr


def test_variants(gpu):
    flash_mla_with_kvcache(**gpu.decode(d_qk=512, dtype=np.float16), causal=True, softmax_scale=0.25)
    launches = gpu.take()
    assert names(launches) == [SCHED, f"{DENSE}.fp16.d512", "combine.sm80.fp16"]
    p = launches[1].params
    assert p["causal"] == 1 and p["scale_log2"] == pytest.approx(0.25 * math.log2(math.e))


def test_outputs_workspace_and_views_are_used_in_place(gpu):
    buffer, lses = gpu.array((2, 1, 64, 640)), gpu.array((2, 64, 3), np.float32)
    out, lse = buffer[:, :, 8:24, :512], lses[:, 8:24, 1:2]
    workspace = gpu.array((mla_workspace_bytes(2, 1, 16),), np.uint8)
    arguments = gpu.decode(out=out, lse=lse, workspace=workspace)
    got_out, got_lse = flash_mla_with_kvcache(**arguments)
    assert got_out is out and got_lse is lse
    plan, decode, merge = gpu.take()
    for launch in (decode, merge):
        p = launch.params
        assert p["out"] == out.data.ptr and (p["out_stride_batch"], p["out_stride_head"]) == (64 * 640, 640)
        assert p["lse"] == lse.data.ptr
        assert (p["lse_stride_batch"], p["lse_stride_head"], p["lse_stride_token"]) == (192, 3, 1)
    inside = range(workspace.data.ptr, workspace.data.ptr + workspace.nbytes)
    d, p = decode.params, plan.params
    pointers = d["o_partial"], d["lse_partial"], p["metadata"], p["num_splits"], p["cost_prefix"]
    assert all(int(pointer) in inside for pointer in pointers)
    float_workspace = gpu.array((-(-workspace.nbytes // 4),), np.float32)
    flash_mla_with_kvcache(**dict(arguments, workspace=float_workspace))
    assert gpu.take()[1].params["o_partial"] == float_workspace.data.ptr


def test_q_view_of_a_larger_buffer_is_read_in_place_and_an_unaligned_one_is_copied(gpu):
    arguments = gpu.decode()
    arguments["q"] = gpu.array((2, 1, 64, 576))[:, :, :16]
    flash_mla_with_kvcache(**arguments)
    assert gpu.launches[1].params["q"] == arguments["q"].data.ptr and not [e for e in gpu.events if type(e) is tuple]
    for q in (gpu.array((2, 1, 16, 576), offset_bytes=2), gpu.array((2, 1, 16, 580))[..., :576],
              gpu.array((2, 1, 16, 1152))[..., ::2], cupy.ndarray((576, 16, 1, 2), BF16, gpu.alloc(1 << 16)).T):
        gpu.events.clear()
        flash_mla_with_kvcache(**dict(arguments, q=q))
        kind, source, copy = gpu.events[0]
        assert kind == "copy" and source is q and gpu.launches[1].params["q"] == copy.data.ptr
        assert (gpu.launches[1].params["q_stride_batch"], gpu.launches[1].params["q_stride_head"]) == (16 * 576, 576)


def test_an_unaligned_out_is_computed_beside_and_assigned(gpu):
    for out in (gpu.array((2, 1, 16, 512), offset_bytes=2), gpu.array((2, 1, 16, 516))[..., 2:514]):
        gpu.events.clear()
        got, lse = flash_mla_with_kvcache(**gpu.decode(out=out))
        kind, target, source = gpu.events[-1]
        assert got is out and kind == "assign" and target is out
        for launch in gpu.launches[1:]:
            assert launch.params["out"] == source.data.ptr != out.data.ptr and launch.params["lse"] == lse.data.ptr


@pytest.mark.parametrize("name, make", [
    ("cache_seqlens", lambda gpu: gpu.array((2,), np.int64)),
    ("cache_seqlens", lambda gpu: gpu.array((4,), np.int32)[::2]),
    ("cache_seqlens", lambda gpu: gpu.array((2,), np.int32)[::-1]),
    ("block_table", lambda gpu: gpu.array((2, 8), np.int64)),
    ("block_table", lambda gpu: gpu.array((8, 2), np.int32).T),
    ("tile_scheduler_metadata", lambda gpu: gpu.array((132, 8), np.int64)),
    ("tile_scheduler_metadata", lambda gpu: gpu.array((132, 8), np.int32, offset_bytes=4)),
    ("num_splits", lambda gpu: gpu.array((6,), np.int32)[::2]),
])
def test_other_integers_are_converted_on_the_device(gpu, name, make):
    arguments = gpu.decode(**gpu.metadata())
    arguments[name] = make(gpu)
    for _ in range(2):
        gpu.events.clear()
        flash_mla_with_kvcache(**arguments)
        (kind, source, copy), decode, merge = gpu.events
        assert kind == "copy" and source is arguments[name] and copy.dtype == np.int32 and copy.flags.c_contiguous
        field = {"tile_scheduler_metadata": "metadata"}.get(name, name)
        if name != "num_splits":  # which no kernel reads
            assert decode.params[field] == copy.data.ptr
    assert len(_plans.PLANS) == 1


def test_block_table_slice_is_read_in_place(gpu):
    arguments = gpu.decode(block_table=gpu.array((2, 30), np.int32)[:, 3:11])
    flash_mla_with_kvcache(**arguments)
    _, decode, _ = gpu.events
    assert decode.params["block_table"] == arguments["block_table"].data.ptr
    assert decode.params["block_table_stride"] == 30


@pytest.mark.parametrize("lengths", [[64, 3], (64, 3), np.array([64, 3]), np.array([64, 3], np.int32)])
def test_host_lengths_beside_device_arrays_are_uploaded(gpu, lengths):
    arguments = gpu.decode(cache_seqlens=lengths, block_table=[[0] * 8, [1] * 8])
    flash_mla_with_kvcache(**arguments)
    uploads = gpu.events[:2]
    assert [event[0] for event in uploads] == ["upload", "upload"]
    assert uploads[0][1].shape == (2, 8) and uploads[1][1].tolist() == [64, 3] and uploads[1][1].dtype == np.int32
    assert gpu.launches[1].params["cache_seqlens"] == uploads[1][2].data.ptr
    gpu.capturing = True
    with pytest.raises(ValueError, match="^block_table: got a host array while its stream is captured"):
        flash_mla_with_kvcache(**arguments)


class Foreign:
    """Another library's GPU array, by __cuda_array_interface__ only."""

    def __init__(self, array):
        self.array = array

    __cuda_array_interface__ = None  # the fake cupy.asarray does not look at it


def test_arrays_of_other_libraries_use_the_plan_of_cupy_arrays(gpu, monkeypatch):
    monkeypatch.setattr(cupy, "asarray", lambda x: x.array)
    monkeypatch.setattr("flashmla_cupy.backends.backend_of", lambda name, x: "cupy")
    arguments = gpu.decode(**gpu.metadata(), out=gpu.array((2, 1, 16, 512)))
    foreign = {name: Foreign(x) if isinstance(x, cupy.ndarray) else x for name, x in arguments.items()}
    out, lse = flash_mla_with_kvcache(**foreign)
    assert out is arguments["out"] and type(lse) is cupy.ndarray
    flash_mla_with_kvcache(**foreign), flash_mla_with_kvcache(**arguments)
    assert len(_plans.PLANS) == 1 and len(gpu.launches) == 6
    assert all(launch.params["out"] == out.data.ptr for launch in gpu.launches)


@pytest.mark.parametrize("change", [
    dict(page_size=0, width=0), dict(width=0), dict(pages=0), dict(pages=0, width=0),
])
def test_nothing_to_attend_writes_zeros_without_a_kernel(gpu, change):
    out, lse = flash_mla_with_kvcache(**gpu.decode(**change))
    assert gpu.launches == [] and gpu.maps == []
    (_, zeroed, zero), (_, filled, infinity) = gpu.events
    assert zeroed.data.ptr == out.data.ptr and zero == 0 and filled is lse and infinity == -math.inf


@pytest.mark.parametrize("change", [dict(batch=0), dict(s_q=0), dict(batch=0, page_size=0)])
def test_empty_results(gpu, change):
    out, lse = flash_mla_with_kvcache(**gpu.decode(**change))
    assert out.size == 0 and lse.size == 0 and gpu.launches == [] and gpu.maps == []


def test_a_planned_call_reuses_plan_and_tensor_map(gpu):
    arguments = gpu.decode(**gpu.metadata())
    layers = [arguments["k_cache"], gpu.array((40, 64, 1, 576))]
    for layer in layers * 3:
        flash_mla_with_kvcache(**dict(arguments, k_cache=layer))
    assert len(_plans.PLANS) == 1 and len(gpu.maps) == 2
    assert [bytes(launch.params["k_map"])[0] for launch in gpu.launches if launch.name == DECODE] == [1, 2] * 3


def test_the_plan_cache_is_bounded_and_can_be_cleared(gpu, monkeypatch):
    monkeypatch.setattr(_plans, "MAX_PLANS", 4)
    for width in range(2, 20):
        flash_mla_with_kvcache(**gpu.decode(width=width))
    assert 0 < len(_plans.PLANS) <= 4
    _plans.clear_plans()
    assert not _plans.PLANS


def test_a_hit_does_not_skip_checks_of_equal_looking_arguments(gpu):
    arguments = gpu.decode()
    flash_mla_with_kvcache(**arguments, causal=True, softmax_scale=1.0)
    with pytest.raises(TypeError, match="^causal: got 1.0, expected a bool"):
        flash_mla_with_kvcache(**arguments, causal=1.0, softmax_scale=1.0)
    with pytest.raises(TypeError, match="^softmax_scale: got True"):
        flash_mla_with_kvcache(**arguments, causal=True, softmax_scale=True)
    gpu.events.clear()
    flash_mla_with_kvcache(**arguments, causal=np.True_, softmax_scale=np.float32(1))
    flash_mla_with_kvcache(**arguments, causal=True, softmax_scale=1)
    assert len(_plans.PLANS) == 1 and len(gpu.launches) == 6


def test_capture_takes_memory_from_the_graph(gpu):
    arguments = gpu.decode(**gpu.metadata())
    flash_mla_with_kvcache(**arguments)
    assert gpu.graph_bytes == 0
    gpu.capturing = True
    flash_mla_with_kvcache(**arguments)
    assert gpu.graph_bytes == _device.half_partial_bytes(132, 16)[1]
    gpu.graph_bytes = 0
    workspace = gpu.array((mla_workspace_bytes(2, 1, 16),), np.uint8)
    flash_mla_with_kvcache(**arguments, workspace=workspace)
    assert gpu.graph_bytes == 0
    flash_mla_with_kvcache(**dict(arguments, cache_seqlens=gpu.array((2,), np.int64)), workspace=workspace)
    assert gpu.graph_bytes == 8  # the converted lengths


def test_everything_runs_on_the_device_of_q(gpu):
    def on_1(x):
        return cupy.ndarray(x.shape, x.dtype, gpu.array(x.shape, x.dtype, device=1).data)

    arguments = {name: on_1(x) if isinstance(x, cupy.ndarray) else x for name, x in gpu.decode().items()}
    out, lse = flash_mla_with_kvcache(**arguments)
    assert [launch.device for launch in gpu.launches] == [1, 1, 1] and gpu.device == 0
    assert out.data.device_id == lse.data.device_id == 1
    metadata, _ = get_mla_metadata(arguments["cache_seqlens"], 16, 1)
    assert metadata.data.device_id == 1 and gpu.device == 0


# ---- get_mla_metadata ----
@pytest.mark.parametrize("rows, h_kv, batch, parts", [
    (16, 1, 7, 132), (64, 1, 100, 132), (65, 1, 7, 66), (128, 1, 64, 66), (128, 2, 7, 33), (0, 1, 7, 132),
    (10**6, 1, 7, 1), (1, 200, 7, 1), (16, 1, 0, 132), (64, 1, 128, 128), (1, 1, 256, 128), (16, 1, 130, 130),
    (16, 1, 127, 132), (16, 2, 64, 64), (16, 1, 32, 132),
])
def test_number_of_parts(rows, h_kv, batch, parts):
    assert sched_meta.num_sm_parts(132, h_kv, rows, batch) == parts


def test_metadata_on_the_device(gpu):
    lengths = gpu.array((7,), np.int32)
    metadata, num_splits = get_mla_metadata(lengths, 128, 1, 128, False, None)
    (launch,) = gpu.take()
    assert launch.name == SCHED and launch.grid == (1, 1, 1) and launch.stream == STREAM
    assert metadata.shape == (66, 8) and num_splits.shape == (8,) and metadata.dtype == num_splits.dtype == np.int32
    assert metadata.flags.c_contiguous and num_splits.flags.c_contiguous and metadata.data.ptr % 16 == 0
    p = launch.params
    assert p["metadata"] == metadata.data.ptr and p["num_splits"] == num_splits.data.ptr
    assert p["cache_seqlens"] == lengths.data.ptr
    assert metadata.data.mem is num_splits.data.mem  # whose memory also holds the scratch
    assert p["cost_prefix"] == metadata.data.mem.ptr and metadata.data.ptr - p["cost_prefix"] >= 8 * 8
    get_mla_metadata(lengths, 128, 1, topk=100)
    assert gpu.take()[0].params["fixed_seqlen"] == 100
    get_mla_metadata(gpu.array((14,), np.int64)[::2], 128, 1)
    assert gpu.events[0][0] == "copy" and gpu.launches[0].params["cache_seqlens"] == gpu.events[0][2].data.ptr


def test_metadata_of_an_empty_batch(gpu):
    metadata, num_splits = get_mla_metadata(gpu.array((0,), np.int32), 128, 1)
    assert metadata.shape == (66, 8) and num_splits.shape == (1,) and gpu.launches == []
    assert [event[0] for event in gpu.events] == ["assign", "assign"]


# ---- merge_states ----
@pytest.mark.parametrize("n, warps", [(1, 1), (4, 1), (5, 2), (8, 2), (9, 4), (16, 4), (17, 8), (33, 16), (257, 16)])
def test_merge_of_a_stacked_array(gpu, n, warps):
    outs, lses = gpu.array((n, 30, 128), np.float32), gpu.array((n, 30), np.float32)
    out, lse = merge_states(outs, lses)
    (launch,) = gpu.events
    p = launch.params
    assert launch.name == "combine.sm80.fp32" and launch.grid == (-(-30 // (16 // warps)), 1, 1)
    assert (out.shape, out.dtype, lse.shape, lse.dtype) == ((30, 128), np.float32, (30,), np.float32)
    assert (p["o_partial"], p["lse_partial"], p["out"], p["lse"]) == tuple(x.data.ptr for x in (outs, lses, out, lse))
    assert p["metadata"] == p["attn_sink"] == p["heads_per_kv_magic"] == p["column_groups_shift"] == 0
    assert (p["batch"], p["s_q"], p["heads_per_kv"], p["h_kv"], p["n_direct"], p["d_v"]) == (1, 30, 1, 1, n, 128)
    assert (p["out_stride_token"], p["lse_stride_token"], 1 << p["warps_per_row_shift"]) == (128, 1, warps)
    assert p["lse_in_scale"] == pytest.approx(math.log2(math.e))


def test_merge_of_decode_results(gpu):
    outs, lses = [gpu.array((2, 3, 16, 512)) for _ in range(2)], [gpu.array((2, 16, 3), np.float32) for _ in range(2)]
    out, lse = merge_states(outs, lses)
    assert out.shape == (2, 3, 16, 512) and out.dtype == BF16 and lse.shape == (2, 16, 3)
    assigns = [event for event in gpu.events if type(event) is tuple]
    assert len(assigns) == 5 and assigns[2][2].shape == (2, 3, 16)  # two outs, two lses by query, the merged lse back
    assert gpu.launches[0].name == "combine.sm80.bf16" and gpu.launches[0].params["s_q"] == 2 * 3 * 16
    assert assigns[4][1] is lse and assigns[4][2].shape == (2, 16, 3)
    gpu.events.clear()
    out, lse = merge_states(gpu.array((2, 2, 1, 16, 512), np.float32), gpu.array((2, 2, 16, 1), np.float32))
    assert [type(event) for event in gpu.events] == [type(gpu.launches[0])]  # one query: nothing to reorder
    assert gpu.launches[0].params["lse"] == lse.data.ptr


def test_merge_of_no_rows(gpu):
    out, lse = merge_states(gpu.array((3, 0, 8), np.float32), gpu.array((3, 0), np.float32))
    assert out.shape == (0, 8) and lse.shape == (0,) and gpu.events == []


@pytest.mark.parametrize("half, rows, requests, h_kv, partials, expected", [
    (False, 16, 1, 1, 132, (16, 1, 16, 2)),  # few rows of many partial results: two blocks share their columns
    (True, 16, 1, 1, 132, (16, 1, 16, 4, "quarters")),  # or four
    (True, 40, 1, 1, 132, (40, 1, 16, 2)),
    (True, 128, 1, 1, 66, (128, 1, 16, 1)),
    (True, 128, 8, 1, 8.25, (16, 8, 2, 1)),           # fewer warps a row than could be, for all at once
    (False, 256, 16, 1, 2.1, (8, 16, 1, 1)),          # each block takes two groups of rows
    (True, 256, 16, 1, 2.1, (8, 16, 1, 1, "pairs")),  # or one of twice as many
    (True, 256, 16, 1, 3, (8, 16, 1, 1)),             # whose partial results are too many
    (True, 128, 65, 1, 0.5, (8, 16, 1, 1)),           # and four or five of the split requests
    (True, 64, 128, 1, 1, (4, 33, 1, 1)), (True, 64, 128, 4, 1, (2, 16, 1, 1, "pairs")),
    (True, 30, 1, 1, 8, (4, 1, 2, 1)),
])
def test_shape_of_combine(half, rows, requests, h_kv, partials, expected):
    shape = combine.shape(rows, requests, h_kv, partials, 132, half)
    assert shape == combine.Shape(*expected)
    assert shape.row_groups * shape.requests * shape.column_groups * h_kv <= 132


@pytest.mark.parametrize("variant", combine.VARIANTS)
@pytest.mark.parametrize("rows, requests, partials", [(16, 1, 132), (256, 16, 2.1), (128, 8, 8.25), (1, 100, 0.5)])
def test_a_kernel_of_combine_can_be_asked_for(gpu, variant, rows, requests, partials):
    shape = combine.shape(rows, requests, 1, partials, 132, True, variant)
    assert shape.variant == variant and (shape.column_groups == 4) == (variant == "quarters")
    assert variant != "pairs" or shape[2:4] == (1, 1)
    with combine.with_variant(variant):
        flash_mla_with_kvcache(**gpu.decode())
        flash_mla_with_kvcache(**gpu.decode(dtype=np.float16))
    merges = [launch.name for launch in gpu.take() if launch.name.startswith("combine")]
    assert merges == [COMBINE + (f".{variant}" if variant != "plain" else ""), "combine.sm80.fp16"]
    flash_mla_with_kvcache(**gpu.decode())
    assert gpu.take()[-1].name == f"{COMBINE}.quarters"


def test_columns_of_a_long_merged_row_are_shared_by_blocks(gpu):
    merge_states(gpu.array((2, 5, 1300), np.float32), gpu.array((2, 5), np.float32))
    assert gpu.launches[0].grid == (1, 3, 1)


@pytest.mark.parametrize("shape", [(2**31 - 15, 4), (1, 65535 * 512 + 4)], ids=str)
def test_more_rows_or_columns_than_the_kernel_counts_are_refused(gpu, shape):
    with pytest.raises(ValueError, match=r"outs: got partial results of shape .*, expected at most 2147483632 rows"):
        merge_states(gpu.array((1, *shape), np.float32), gpu.array((1, *shape[:-1]), np.float32))
    assert gpu.events == []


# ---- host time ----
def test_host_time_of_a_planned_call(gpu):
    """The library's own share of an eager call, without the launches. The bound is loose: machines differ."""
    class Null:
        def launch(self, *args, **kwargs):
            pass

    arguments = gpu.decode(**gpu.metadata(), out=gpu.array((2, 1, 16, 512)), lse=gpu.array((2, 16, 1), np.float32))
    arguments["workspace"] = gpu.array((mla_workspace_bytes(2, 1, 16),), np.uint8)
    flash_mla_with_kvcache(**arguments)
    (plan,) = _plans.PLANS.values()
    plan.kernel = plan.combine = Null()
    best = math.inf
    for _ in range(5):
        begin = time.perf_counter()
        for _ in range(500):
            flash_mla_with_kvcache(**arguments)
        best = min(best, (time.perf_counter() - begin) / 500)
    print(f"host time of a planned call: {best * 1e6:.1f} us", file=sys.stderr)
    assert best < 100e-6


@pytest.mark.parametrize("name", list(params.STRUCTS))
def test_pointers_go_to_their_fields(name):
    dtype = params.STRUCTS[name]
    pointers = [field for field in dtype.names if dtype[field] == np.uint64]
    template, values = _device.ParamTemplate(name), range(1, len(pointers) + 1)
    record = np.frombuffer(template.fill(*values), dtype)[0]
    assert [int(record[field]) for field in pointers] == list(values)
    for count in (len(pointers) - 1, len(pointers) + 1):
        with pytest.raises(struct.error):
            template.fill(*range(count))
