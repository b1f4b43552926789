"""Paged (or contiguous) MLA decode over a 16-bit KV cache: check -> select -> plan -> launch.

A call whose arrays can be used as they are is planned once per (shapes, strides, types, alignment, devices): the plan
holds kernels, grids and parameter bytes, and the next such call only fills in pointers. Other arrays (lengths as
int64 or on the host, an unaligned q or out, another library's arrays) are staged first, on every call.
"""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from flashmla_cupy import backends
from flashmla_cupy.runtime import params as kernel_params
from flashmla_cupy.runtime import tensor_map

from . import _checks, _device, _overlap, _plans, combine, sched_meta
from ._checks import HEAD_DIM_V, DecodeProblem
from ._select import Problem

_ARRAYS = ("q", "k_cache", "block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits", "out", "lse",
           "workspace")
_INTEGERS, _OUTPUTS = _ARRAYS[2:6], _ARRAYS[6:]
_OPTIONAL = _ARRAYS[2:]  # the checks say which of these must be there


def decode(options: tuple[int, bool, float | None], arrays: tuple) -> tuple[Any, Any]:
    """flash_mla_with_kvcache without indices over a 16-bit cache. Without a copy in between: this is the fast path.

    options: head_dim_v, causal and softmax_scale (None: the default) as int, bool and float. arrays: as in _ARRAYS.
    """
    q = arrays[0]
    if type(q) is not cupy.ndarray:
        if backends.backend_of("q", q) == "numpy":
            return _on_host(options, arrays)
        q = backends.as_device("q", q)
        arrays = (q, *arrays[1:])
    plan = _plans.PLANS.get((options, *map(_plans.signature, arrays)))
    device_id = q.data.device_id
    if device_id == _device.current_device():
        return _stage(options, arrays) if plan is None else plan.run(*arrays)
    with _device.on_device(device_id):
        return _stage(options, arrays) if plan is None else plan.run(*arrays)


def mla_workspace_bytes(batch: int, s_q: int, h_q: int, h_kv: int = 1, num_sm_parts: int | None = None) -> int:
    """Bytes that `workspace` of flash_mla_with_kvcache needs at most, with or without metadata given.

    num_sm_parts: rows of the metadata; None: as many as get_mla_metadata gives on CuPy's current device.

    Raises:
        TypeError, ValueError: an argument that is no int, is below 0 (heads and parts: below 1), or heads that do not
        divide.
    """
    batch, s_q = _checks.check_int("batch", batch, 0), _checks.check_int("s_q", s_q, 0)
    h_q, h_kv = _checks.check_int("h_q", h_q, 1), _checks.check_int("h_kv", h_kv, 1)
    if h_q % h_kv:
        raise ValueError(f"h_q: got {h_q}, expected a multiple of h_kv = {h_kv}")
    if num_sm_parts is None:
        num_sm_parts = sched_meta.num_sm_parts(sched_meta.sm_count(None), h_kv, s_q * h_q // h_kv)
    parts = _checks.check_int("num_sm_parts", num_sm_parts, 1)
    partial_bytes = _device.partial_bytes(parts, s_q * h_q)[1] if parts > 1 else 0
    return partial_bytes + sched_meta.plan_bytes(batch, parts)


# ---- NumPy backend ----
def _on_host(options: tuple, arrays: tuple) -> tuple[np.ndarray, np.ndarray]:
    from flashmla_cupy.reference import dense_decode as reference
    from flashmla_cupy.reference._numerics import cast

    given = dict(zip(_ARRAYS, arrays, strict=True))
    named = backends.host_arguments(given, _INTEGERS, _OUTPUTS)
    q, k_cache, block_table, cache_seqlens, metadata, num_splits, out, lse, workspace = named.values()
    head_dim_v, causal, softmax_scale = options
    problem = _checks.check_decode(q, k_cache, block_table, cache_seqlens, head_dim_v, metadata, num_splits, causal,
                                   softmax_scale, out, lse)
    if workspace is not None:
        _checks.check_workspace(workspace, _Plan.workspace_bytes(problem, metadata, None))
    _overlap.check(named, given)
    out = np.empty(problem.out_shape, q.dtype) if out is None else out
    lse = np.empty(problem.lse_shape, np.float32) if lse is None else lse
    if 0 not in q.shape:
        _checks.check_pages(block_table, cache_seqlens, problem)
    if problem.nothing_to_attend or 0 in q.shape:
        out[...], lse[...] = 0, -np.inf
    else:
        exact_out, exact_lse = reference.attend(
            q, k_cache, block_table, cache_seqlens, HEAD_DIM_V, softmax_scale=problem.softmax_scale,
            causal=problem.causal)
        out[...], lse[...] = cast(exact_out, q.dtype), cast(exact_lse, np.float32)
    return out, lse


# ---- staging: check everything, convert what a kernel cannot read ----
def _stage(options: tuple, arrays: tuple) -> tuple[Any, Any]:
    """Runs a call for which there is no plan, on q's device: checks, then a new plan or staged arrays."""
    named = {name: None if x is None and name in _OPTIONAL else
             (backends.as_integers if name in _INTEGERS else backends.as_device)(name, x)
             for name, x in zip(_ARRAYS, arrays, strict=True)}
    if any(x is not given for x, given in zip(named.values(), arrays, strict=True)):
        arrays = tuple(named.values())  # as CuPy arrays, the call may be a planned one
        plan = _plans.PLANS.get((options, *map(_plans.signature, arrays)))
        if plan is not None:
            return plan.run(*arrays)
    q, k_cache, table, lengths, metadata, num_splits, out, lse, workspace = arrays
    integers = table, lengths, metadata, num_splits
    head_dim_v, causal, softmax_scale = options
    problem = _checks.check_decode(q, k_cache, table, lengths, head_dim_v, metadata, num_splits, causal, softmax_scale,
                                   out, lse)
    device_id = q.data.device_id
    _checks.check_same_device(device_id, **named)
    _checks.check_element_alignment(**named)
    if not problem.nothing_to_attend:
        _checks.check_cache_layout(k_cache)
    if workspace is not None:
        _checks.check_workspace(workspace, _Plan.workspace_bytes(problem, metadata, device_id))
    _overlap.check(named)

    usable = (_device.loads_16_bytes(q) and (out is None or _device.loads_16_bytes(out))
              and all(_is_int32(x, rows_may_be_apart=x is table) for x in integers)
              and (metadata is None or metadata.data.ptr % 16 == 0))
    if usable:
        plan = _Plan(problem, named)
        _plans.remember((options, *map(_plans.signature, arrays)), plan)
        return plan.run(*arrays)

    stream_ptr = _device.current_stream_ptr()
    result_out = cupy.empty(problem.out_shape, q.dtype) if out is None else out
    result_lse = cupy.empty(problem.lse_shape, np.float32) if lse is None else lse
    with _device.temporaries(stream_ptr):
        _run_staged(options, named, result_out, result_lse, stream_ptr)
    return result_out, result_lse


def _run_staged(options: tuple, named: dict, result_out: Any, result_lse: Any, stream_ptr: int) -> None:
    """Copies what cannot be used as it is, and calls again; the copies are gone when this returns."""
    staged = dict(named, out=result_out, lse=result_lse)
    for name in ("block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits"):
        staged[name] = _staged_integers(name, named[name], stream_ptr)
    if not _device.loads_16_bytes(named["q"]):
        staged["q"] = _device.contiguous(named["q"])
    if not _device.loads_16_bytes(result_out):
        staged["out"] = cupy.empty(result_out.shape, result_out.dtype)
    arrays = tuple(staged.values())
    plan = _plans.PLANS.get((options, *map(_plans.signature, arrays)))
    _stage(options, arrays) if plan is None else plan.run(*arrays)
    if staged["out"] is not result_out:
        _device.assign(result_out, staged["out"])


def _staged_integers(name: str, x: Any, stream_ptr: int) -> Any:
    if x is None:
        return None
    if isinstance(x, np.ndarray):
        return _device.upload(name, x, stream_ptr)
    if _is_int32(x, rows_may_be_apart=name == "block_table") and (name != "tile_scheduler_metadata"
                                                                 or x.data.ptr % 16 == 0):
        return x
    return _device.as_int32(x)


def _is_int32(x: Any, rows_may_be_apart: bool = False) -> bool:
    """Whether a kernel can read `x` (or None) in place: int32, contiguous, for the block table within each row."""
    if x is None:
        return True
    if isinstance(x, np.ndarray) or x.dtype != np.int32:
        return False
    if x.size == 0 or (rows_may_be_apart and (x.shape[1] == 1 or x.strides[1] == 4)):
        return True
    return x.flags.c_contiguous


# ---- plan and launch ----
class _Plan:
    """One call worked out but for its pointers: kernels, grids, parameter bytes, workspace layout."""

    def __init__(self, problem: DecodeProblem, arrays: dict) -> None:
        """`arrays`: the call's arguments by name, checked and directly usable, all on the current device."""
        q, k_cache, table = arrays["q"], arrays["k_cache"], arrays["block_table"]
        metadata, out, lse = arrays["tile_scheduler_metadata"], arrays["out"], arrays["lse"]
        p, device_id = problem, q.data.device_id
        self.problem, self.overlap = p, _overlap.watch(arrays)
        self.out_shape, self.lse_shape, self.dtype = p.out_shape, p.lse_shape, q.dtype
        self.empty = p.nothing_to_attend or 0 in q.shape
        if self.empty:
            return
        self.parts, self.splits = self.parts_and_splits(p, metadata, device_id)
        self.plans_inside = self.splits and metadata is None
        self.o_bytes, self.plan_offset = _partial_bytes(p, self.parts) if self.splits else (0, 0)
        self.total_bytes = self.workspace_bytes(p, metadata, device_id)

        self.kernel = _device.get_kernel(Problem("dense_decode", p.dtype, p.d_qk, HEAD_DIM_V), device_id)
        self.grid = (-(-p.rows // sched_meta.QUERY_ROWS_PER_BLOCK), p.h_kv, self.parts)
        map_arguments = _map_arguments(k_cache, p)
        self.maps, self.partial_maps = _device.TensorMaps(map_arguments), {0: bytes(tensor_map.BYTES)}
        float32 = np.dtype(np.float32)
        out_strides = _device.strides_of(out, self.out_shape, q.dtype)[:3]
        lse_strides = _device.strides_of(lse, self.lse_shape, float32)
        strides = {**_device.element_strides("q", q.strides[:3], q.dtype, "batch token head"),
                   **_device.element_strides("out", out_strides, q.dtype, "batch token head"),
                   **_device.element_strides("lse", lse_strides, float32, "batch head token")}
        sizes = dict(batch=p.batch, s_q=p.s_q, heads_per_kv=p.heads_per_kv, h_kv=p.h_kv, num_sm_parts=self.parts)
        magic, shift = kernel_params.divisor(p.heads_per_kv)
        self.params = _device.ParamTemplate(
            "DenseDecodeParams", **strides, **sizes, block_table_stride=0 if table is None else table.strides[0] // 4,
            causal=p.causal, page_size=p.page_size, box_tokens=map_arguments["box"][1], max_seqlen=p.max_seqlen,
            scale_log2=p.softmax_scale * math.log2(math.e), heads_per_kv_magic=magic, heads_per_kv_shift=shift)
        if self.splits:
            self.partial_maps = _device.TensorMaps(_partial_map_arguments(p, self.parts))
            of_q = "q_stride_batch", "q_stride_token", "q_stride_head"
            self.combine = combine.AfterSplit(
                p.batch, self.parts, p.dtype, _has_half_partials(p), device_id,
                dict({name: stride for name, stride in strides.items() if name not in of_q}, s_q=p.s_q,
                     heads_per_kv=p.heads_per_kv, h_kv=p.h_kv))

    @staticmethod
    def parts_and_splits(p: DecodeProblem, metadata: Any, device_id: int | None) -> tuple[int, bool]:
        """The number of SM parts, and whether a request may be split; if not, each part has as many whole ones.

        Metadata may split any request of more than one block, whatever its length.
        """
        if metadata is not None:
            parts = metadata.shape[0]
        else:
            parts = sched_meta.num_sm_parts(sched_meta.sm_count(device_id), p.h_kv, p.rows, p.batch)
        return parts, parts > 1 and p.max_seqlen > sched_meta.KV_BLOCK_TOKENS

    @classmethod
    def workspace_bytes(cls, p: DecodeProblem, metadata: Any, device_id: int | None) -> int:
        if p.nothing_to_attend or p.batch * p.s_q == 0:
            return 0
        parts, splits = cls.parts_and_splits(p, metadata, device_id)
        if not splits:
            return 0
        return _partial_bytes(p, parts)[1] + (sched_meta.plan_bytes(p.batch, parts) if metadata is None else 0)

    def run(self, q, k_cache, table, lengths, metadata, num_splits, out, lse, workspace) -> tuple[Any, Any]:
        """Launches on the current device, which is q's; the arrays have the signatures that the plan was made for.

        Raises ValueError where what the call writes overlaps another argument.
        """
        q_ptr, cache_ptr, lengths_ptr = q.data.ptr, k_cache.data.ptr, lengths.data.ptr
        table_ptr = 0 if table is None else table.data.ptr
        metadata_ptr, splits_ptr = (0, 0) if metadata is None else (metadata.data.ptr, num_splits.data.ptr)
        out_ptr, lse_ptr = 0 if out is None else out.data.ptr, 0 if lse is None else lse.data.ptr
        if self.overlap is not None:
            addresses = (q_ptr, cache_ptr, table_ptr, lengths_ptr, metadata_ptr, splits_ptr, out_ptr, lse_ptr,
                         0 if workspace is None else workspace.data.ptr)
            if addresses not in self.overlap.known:
                arrays = q, k_cache, table, lengths, metadata, num_splits, out, lse, workspace
                self.overlap.look(addresses, dict(zip(_ARRAYS, arrays, strict=True)))
        if out is None:
            out = cupy.empty(self.out_shape, self.dtype)
            out_ptr = out.data.ptr
        if lse is None:
            lse = cupy.empty(self.lse_shape, np.float32)
            lse_ptr = lse.data.ptr
        if self.empty:
            _device.assign(out.view(np.uint16), 0)
            _device.assign(lse, -np.inf)
            return out, lse

        stream_ptr = _device.current_stream_ptr()
        if self.splits:
            memory = _device.scratch(self.total_bytes, stream_ptr) if workspace is None else workspace.data
            o_partial, lse_partial = memory.ptr, memory.ptr + self.o_bytes
        else:
            o_partial = lse_partial = metadata_ptr = 0
        if self.plans_inside:
            base = memory.ptr + self.plan_offset
            metadata_offset, splits_offset, _ = sched_meta.plan_offsets(self.problem.batch, self.parts)
            metadata_ptr, splits_ptr = base + metadata_offset, base + splits_offset
            sched_meta.launch_plan(self.problem.batch, self.parts, lengths_ptr, metadata_ptr, splits_ptr, base,
                                   stream_ptr)

        params = self.params.fill(q_ptr, out_ptr, lse_ptr, o_partial, lse_partial, lengths_ptr, table_ptr, metadata_ptr,
                                  head=self.maps[cache_ptr] + self.partial_maps[o_partial])
        self.kernel.launch(self.grid, params, pdl=True, stream_ptr=stream_ptr)
        if self.splits:
            self.combine.launch(o_partial, lse_partial, out_ptr, lse_ptr, metadata_ptr, 0, stream_ptr)
        return out, lse


def _map_arguments(k_cache: Any, p: DecodeProblem) -> dict[str, Any]:
    """The cache as the copy engine sees it, innermost first: 64 dims | tokens of a page | d_qk / 64 | h_kv | pages."""
    page, token, head = k_cache.strides[:3]
    # The stride of an axis of one element is free in CuPy, but not in a tensor map.
    row_bytes = p.d_qk * k_cache.dtype.itemsize
    token = token if p.page_size > 1 else row_bytes
    head = head if p.h_kv > 1 else row_bytes
    page = page if p.pages > 1 else row_bytes
    box_tokens = min(64, p.page_size) if p.table_width is not None else 64
    return dict(dtype_name=p.dtype, shape=(64, p.page_size, p.d_qk // 64, p.h_kv, p.pages),
                strides_bytes=(token, 128, head, page), box=(64, box_tokens, 1, 1, 1))


def _has_half_partials(p: DecodeProblem) -> bool:
    """Whether partial outputs are fp16 with factors: an eighth of bfloat16's rounding, but all of float16's."""
    return p.dtype == "bfloat16"


def _partial_bytes(p: DecodeProblem, parts: int) -> tuple[int, int]:
    """Bytes of the partial outputs, and with what lies behind them."""
    return (_device.half_partial_bytes if _has_half_partials(p) else _device.partial_bytes)(parts, p.s_q * p.h_q)


def _partial_map_arguments(p: DecodeProblem, parts: int) -> dict[str, Any]:
    """Partial outputs as the copy engine sees them: 512 columns | rows | h_kv of each slot; 128 bytes a row and box."""
    dtype_name, size = ("float16", 2) if _has_half_partials(p) else ("float32", 4)
    return dict(dtype_name=dtype_name, shape=(HEAD_DIM_V, p.rows, 2 * parts * p.h_kv),
                strides_bytes=(HEAD_DIM_V * size, p.rows * HEAD_DIM_V * size), box=(128 // size, 16, 1))
