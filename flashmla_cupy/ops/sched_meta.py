"""The tile scheduler: which SM part works on which KV blocks of which requests."""

from __future__ import annotations

import functools
from typing import Any

import cupy
import numpy as np

from flashmla_cupy.backends import as_integers
from flashmla_cupy.reference import sched_meta as reference
from flashmla_cupy.runtime.device import gpu_available

from . import _checks, _device
from ._select import Problem

KV_BLOCK_TOKENS = 64
QUERY_ROWS_PER_BLOCK = 64
NOMINAL_SM_COUNT = 132  # where there is no GPU to ask: that of an H100 or H200
_NO_FIXED_SEQLEN = -1


def sm_count(device_id: int | None) -> int:
    """SMs of a device; None, for host arrays: of CuPy's current device, and of an H200 without a GPU."""
    if device_id is None:
        if not gpu_available():
            return NOMINAL_SM_COUNT
        device_id = _device.current_device()
    return _device.info(device_id).sm_count


def num_sm_parts(sm_count: int, num_heads_k: int, num_q_tokens_per_head_k: int, batch: int = 0) -> int:
    """How many parts share the KV blocks: CTAs that fit at once, over those that each part needs. batch 0: at most.

    Where one block of rows has them all and memory binds, one part in 32 can be spared: then it is the largest number
    that divides the batch, if there is one (docs/perf-log.md).
    """
    blocks_of_rows = max(1, -(-num_q_tokens_per_head_k // QUERY_ROWS_PER_BLOCK))
    parts = max(1, sm_count // num_heads_k // blocks_of_rows)
    if blocks_of_rows == 1 and batch:
        for even in range(parts, parts - parts // 32 - 1, -1):
            if batch % even == 0:
                return even
    return parts


def num_sparse_sm_parts(sm_count: int, s_q: int, h_q: int, h_kv: int = 1) -> int:
    """The same for sparse attention, where query tokens attend to different keys and cannot share a block of rows."""
    return max(1, sm_count // h_kv // max(1, s_q * -(-(h_q // h_kv) // QUERY_ROWS_PER_BLOCK)))


def overhead_blocks(batch: int, parts: int, equally_long: bool) -> int:
    """Fixed cost of a fragment, in KV blocks (docs/perf-log.md).

    4 keeps requests whole that are about as many as the parts, and a request that has nearly all parts to itself from
    being cut into single blocks. In between 2 makes the parts more even; where requests are equally long (sparse
    attention: topk) and fewer than half of the parts, 1.
    """
    if equally_long:
        return 1 if 2 * batch <= parts else 4
    return 2 if 2 * batch <= parts <= 32 * batch else 4


def cuts_nothing(batch: int, parts: int, tokens: int) -> bool:
    """Whether the plan of requests of `tokens` tokens each (topk) leaves all of them whole."""
    overhead = overhead_blocks(batch, parts, equally_long=True)
    return reference.cuts_nothing(batch, parts, -(-tokens // KV_BLOCK_TOKENS), overhead)


def get_mla_metadata(cache_seqlens: Any, num_q_tokens_per_head_k: int, num_heads_k: int,
                     num_heads_q: int | None = None, is_fp8_kvcache: bool = False, topk: int | None = None):
    """The tile-scheduler metadata of a decode call, from lengths on the device, without a host synchronisation.

    Args:
        cache_seqlens: (batch,) integers; int32 CuPy arrays are read in place, other types are converted. Negative
            lengths count as 0.
        num_q_tokens_per_head_k: s_q * h_q // h_kv.
        num_heads_k: h_kv.
        num_heads_q: h_q; with topk it tells how many query tokens share the SMs.
        is_fp8_kvcache: accepted for FlashMLA's signature; the plan does not depend on it.
        topk: for sparse attention, the tokens that every query attends to; cache_seqlens then only gives the batch.

    Returns:
        tile_scheduler_metadata: (num_sm_parts, 8) int32, and num_splits: (batch + 1,) int32, the exclusive prefix sum
        of the fragments of each request. Their shapes depend on the arguments' shapes alone. CuPy arrays on the
        lengths' device, written on CuPy's current stream there; NumPy arrays when cache_seqlens is on the host. Keep
        them as long as a CUDA graph that was captured with them.

    Raises:
        TypeError, ValueError: a wrong argument. UnsupportedError: no kernel for the device.
    """
    if cache_seqlens is None:
        raise TypeError("cache_seqlens: got None, expected int32 lengths of shape (batch,)")
    lengths = as_integers("cache_seqlens", cache_seqlens)
    _checks.check_ndim("cache_seqlens", lengths, 1, "(batch,)")
    rows = _checks.check_int("num_q_tokens_per_head_k", num_q_tokens_per_head_k, 0)
    h_kv = _checks.check_int("num_heads_k", num_heads_k, 1)
    if num_heads_q is not None and _checks.check_int("num_heads_q", num_heads_q, 1) % h_kv:
        raise ValueError(f"num_heads_q: got {num_heads_q}, expected a multiple of num_heads_k = {h_kv}")
    if num_heads_q is not None and rows % (num_heads_q // h_kv):
        raise ValueError(f"num_q_tokens_per_head_k: got {rows}, expected a multiple of num_heads_q // num_heads_k = "
                         f"{num_heads_q // h_kv}")
    _checks.check_bool("is_fp8_kvcache", is_fp8_kvcache)
    if topk is not None:
        topk = _checks.check_int("topk", topk, 0)

    def parts_of(sm_count: int) -> int:
        if topk is None or num_heads_q is None:
            return num_sm_parts(sm_count, h_kv, rows, len(lengths))
        return num_sparse_sm_parts(sm_count, rows * h_kv // num_heads_q, num_heads_q, h_kv)

    if isinstance(lengths, np.ndarray):
        parts = parts_of(NOMINAL_SM_COUNT)
        return reference.plan(lengths, parts, block_size=KV_BLOCK_TOKENS, topk=topk,
                              overhead_blocks=overhead_blocks(len(lengths), parts, topk is not None))

    _checks.check_element_alignment(cache_seqlens=lengths)
    device_id = lengths.data.device_id
    with _device.on_device(device_id):
        batch = lengths.shape[0]
        parts = parts_of(_device.info(device_id).sm_count)
        buffer = cupy.empty(plan_bytes(batch, parts), np.uint8)  # the views returned keep the scratch part alive too
        metadata, num_splits = plan_views(buffer, batch, parts)
        write_plan(lengths, metadata, num_splits, buffer.data.ptr, _device.current_stream_ptr(), topk)
    return metadata, num_splits


# ---- the plan in memory: cost prefix int64 (batch + 1) | metadata int32 (parts, 8) | num_splits int32 (batch + 1) ----
def plan_offsets(batch: int, parts: int) -> tuple[int, int, int]:
    """Byte offsets of the metadata and of num_splits behind the cost prefix, and the total size."""
    metadata = -(-8 * (batch + 1) // 16) * 16
    num_splits = metadata + 4 * _checks.METADATA_WIDTH * parts
    return metadata, num_splits, num_splits + -(-4 * (batch + 1) // 16) * 16


def plan_bytes(batch: int, parts: int) -> int:
    return plan_offsets(batch, parts)[2]


def plan_views(buffer: Any, batch: int, parts: int) -> tuple[Any, Any]:
    """metadata and num_splits inside a uint8 array of plan_bytes."""
    metadata, num_splits, _ = plan_offsets(batch, parts)
    return (buffer[metadata:num_splits].view(np.int32).reshape(parts, _checks.METADATA_WIDTH),
            buffer[num_splits:num_splits + 4 * (batch + 1)].view(np.int32))


def write_plan(lengths: Any, metadata: Any, num_splits: Any, cost_prefix_ptr: int, stream_ptr: int,
               topk: int | None = None) -> None:
    """Enqueue, on the current device, the plan of `lengths` (batch,) into contiguous `metadata` and `num_splits`."""
    batch, parts = lengths.shape[0], metadata.shape[0]
    if batch == 0:
        _device.assign(metadata, 0)
        _device.assign(num_splits, 0)
        return
    with _device.temporaries(stream_ptr):
        if lengths.dtype != np.int32 or lengths.strides[0] != 4:
            lengths = _device.as_int32(lengths)
        launch_plan(batch, parts, lengths.data.ptr, metadata.data.ptr, num_splits.data.ptr, cost_prefix_ptr, stream_ptr,
                    topk)
        del lengths  # a temporary goes back inside the block


def launch_plan(batch: int, parts: int, lengths_ptr: int, metadata_ptr: int, num_splits_ptr: int, cost_prefix_ptr: int,
                stream_ptr: int, topk: int | None = None) -> None:
    """One launch of the scheduler on the current device; all pointers are device addresses."""
    kernel = _device.get_kernel(Problem("sched_meta"), _device.current_device())
    params = _template(batch, parts, topk).fill(lengths_ptr, metadata_ptr, num_splits_ptr, cost_prefix_ptr)
    kernel.launch((1, 1, 1), params, pdl=True, stream_ptr=stream_ptr)


@functools.lru_cache(maxsize=256)
def _template(batch: int, parts: int, topk: int | None) -> _device.ParamTemplate:
    return _device.ParamTemplate("SchedMetaParams", batch=batch, num_sm_parts=parts, block_size=KV_BLOCK_TOKENS,
                                 overhead_blocks=overhead_blocks(batch, parts, topk is not None),
                                 fixed_seqlen=_NO_FIXED_SEQLEN if topk is None else topk)
