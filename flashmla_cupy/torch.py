"""Drop-in for decode and sparse prefill of the `flash_mla` package: torch tensors in, torch tensors out.

    from flashmla_cupy.torch import flash_mla_sparse_fwd, flash_mla_with_kvcache, get_mla_metadata

Function names, argument order and results are FlashMLA's, in both of its forms: get_mla_metadata with arguments gives
(tile_scheduler_metadata, num_splits) tensors, without arguments a FlashMLASchedMeta that plans at its first use. The
log-sum-exp of a query that sees no token is +inf here, as FlashMLA has it (-inf in flashmla_cupy itself). To merge such
results with flashmla_cupy.merge_states, make it -inf first: lse.masked_fill(lse == math.inf, -math.inf).

Everything runs on torch's current stream of q's device, with memory of torch's allocator, and can be captured into a
torch.cuda.CUDAGraph. CPU tensors run on the NumPy backend.
"""

from __future__ import annotations

import dataclasses
import math
from contextlib import ExitStack
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import torch

from flashmla_cupy.backends import describe
from flashmla_cupy.ops import _checks, decode, sched_meta, sparse_decode, sparse_prefill
from flashmla_cupy.ops import _device as ops_device

__all__ = ["FlashMLASchedMeta", "get_mla_metadata", "flash_mla_sparse_fwd", "flash_mla_with_kvcache"]

_NUMPY_DTYPES = {
    torch.bfloat16: np.dtype(ml_dtypes.bfloat16), torch.float16: np.dtype(np.float16),
    torch.float32: np.dtype(np.float32), torch.float64: np.dtype(np.float64), torch.uint8: np.dtype(np.uint8),
    torch.int8: np.dtype(np.int8), torch.int16: np.dtype(np.int16), torch.int32: np.dtype(np.int32),
    torch.int64: np.dtype(np.int64), torch.bool: np.dtype(np.bool_), torch.float8_e4m3fn: np.dtype(np.uint8),
}
_streams: dict[int, Any] = {}  # stream address -> CuPy's view of it
_MAX_STREAMS = 256


@dataclasses.dataclass
class FlashMLASchedMeta:
    """The plan of a kind of call, made at its first use and reused by later calls of the same shapes.

    Lengths changed in place after that stay right; only the spread of the work over the GPU gets stale.
    """

    @dataclasses.dataclass
    class Config:
        b: int
        s_q: int
        h_q: int
        page_block_size: int
        h_k: int
        causal: bool
        is_fp8_kvcache: bool
        topk: int | None
        extra_page_block_size: int | None
        extra_topk: int | None

    have_initialized: bool = False
    config: Config | None = None
    tile_scheduler_metadata: torch.Tensor | None = None  # (num_sm_parts, 8) int32
    num_splits: torch.Tensor | None = None  # (batch + 1,) int32


def get_mla_metadata(
    cache_seqlens: torch.Tensor | None = None, num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None, num_heads_q: int | None = None, is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Any]:
    """With arguments: (tile_scheduler_metadata, num_splits) int32 tensors, see flashmla_cupy.get_mla_metadata.

    Without: (FlashMLASchedMeta(), None), to be passed to every call of the same shapes.
    """
    if cache_seqlens is None and num_q_tokens_per_head_k is None and num_heads_k is None:
        return FlashMLASchedMeta(), None
    if not isinstance(cache_seqlens, torch.Tensor):
        raise TypeError(f"cache_seqlens: got {describe(cache_seqlens)}, expected an int32 torch.Tensor (batch,)")
    with _torch_runs(cache_seqlens.device):
        metadata, num_splits = sched_meta.get_mla_metadata(
            _share("cache_seqlens", cache_seqlens), num_q_tokens_per_head_k, num_heads_k, num_heads_q, is_fp8_kvcache,
            topk)
        return _tensor(metadata), _tensor(num_splits)


def flash_mla_with_kvcache(
    q: torch.Tensor, k_cache: torch.Tensor, block_table: torch.Tensor | None, cache_seqlens: torch.Tensor | None,
    head_dim_v: int, tile_scheduler_metadata: FlashMLASchedMeta | torch.Tensor | None,
    num_splits: torch.Tensor | None = None, softmax_scale: float | None = None, causal: bool = False,
    is_fp8_kvcache: bool = False, indices: torch.Tensor | None = None, attn_sink: torch.Tensor | None = None,
    extra_k_cache: torch.Tensor | None = None, extra_indices_in_kvcache: torch.Tensor | None = None,
    topk_length: torch.Tensor | None = None, extra_topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """flashmla_cupy.flash_mla_with_kvcache with FlashMLA's argument order, on torch tensors.

    Args:
        tile_scheduler_metadata, num_splits: both results of get_mla_metadata, in either form; None, None plans inside.
        k_cache, extra_k_cache: with is_fp8_kvcache float8_e4m3fn, uint8 or int8.
        extra_indices_in_kvcache: extra_indices there.
        The rest as in flashmla_cupy.flash_mla_with_kvcache. Without gradients.

    Returns:
        out (batch, s_q, h_q, 512) of q's dtype, and lse (batch, h_q, s_q) float32, +inf where a query sees no token.

    Raises:
        as flashmla_cupy.flash_mla_with_kvcache, and ValueError for a FlashMLASchedMeta first used with other shapes.
    """
    for name, x in (("q", q), ("k_cache", k_cache)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name}: got {describe(x)}, expected a torch.Tensor")
        if x.dim() != 4:
            raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected 4 axes")
    with _torch_runs(q.device):
        sched = tile_scheduler_metadata if isinstance(tile_scheduler_metadata, FlashMLASchedMeta) else None
        if sched is not None:
            if num_splits is not None:
                raise TypeError("num_splits: got a value, expected None together with a FlashMLASchedMeta")
            config = FlashMLASchedMeta.Config(
                *q.shape[:3], *k_cache.shape[1:3], causal, is_fp8_kvcache, _size(indices, -1),
                _size(extra_k_cache, 1), _size(extra_indices_in_kvcache, -1))
            _check_config(sched, config)
            tile_scheduler_metadata, num_splits = sched.tile_scheduler_metadata, sched.num_splits
        arguments = dict(
            q=_share("q", q), k_cache=_share("k_cache", k_cache), block_table=_share("block_table", block_table),
            cache_seqlens=_share("cache_seqlens", cache_seqlens), head_dim_v=head_dim_v, causal=causal,
            is_fp8_kvcache=is_fp8_kvcache, indices=_share("indices", indices), softmax_scale=softmax_scale,
            attn_sink=_share("attn_sink", attn_sink), topk_length=_share("topk_length", topk_length),
            extra_k_cache=_share("extra_k_cache", extra_k_cache),
            extra_indices=_share("extra_indices_in_kvcache", extra_indices_in_kvcache),
            extra_topk_length=_share("extra_topk_length", extra_topk_length))
        if sched is not None and not sched.have_initialized:
            tile_scheduler_metadata, num_splits = _first_plan(arguments, q, k_cache, cache_seqlens)
        out = torch.empty((*q.shape[:3], _checks.HEAD_DIM_V), dtype=q.dtype, device=q.device)
        lse = torch.empty((q.shape[0], q.shape[2], q.shape[1]), dtype=torch.float32, device=q.device)
        decode.flash_mla_with_kvcache(
            **arguments, tile_scheduler_metadata=_share("tile_scheduler_metadata", tile_scheduler_metadata),
            num_splits=_share("num_splits", num_splits), out=_share("out", out), lse=_share("lse", lse))
        if sched is not None and not sched.have_initialized:
            sched.have_initialized, sched.config = True, config
            sched.tile_scheduler_metadata, sched.num_splits = tile_scheduler_metadata, num_splits
        _mark_empty(lse)
    return out, lse


def flash_mla_sparse_fwd(
    q: torch.Tensor, kv: torch.Tensor, indices: torch.Tensor, sm_scale: float, d_v: int = 512,
    attn_sink: torch.Tensor | None = None, topk_length: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """flashmla_cupy.flash_mla_sparse_fwd on torch tensors, see there. Without gradients.

    Returns:
        out (s_q, h_q, 512) of q's dtype, max_logits (s_q, h_q) float32, -inf where a token attends to nothing, and lse
        (s_q, h_q) float32, +inf there.

    Raises:
        as flashmla_cupy.flash_mla_sparse_fwd.
    """
    if not isinstance(q, torch.Tensor):
        raise TypeError(f"q: got {describe(q)}, expected a torch.Tensor")
    if q.dim() != 3:
        raise ValueError(f"q: got shape {tuple(q.shape)}, expected 3 axes (s_q, h_q, d_qk)")
    with _torch_runs(q.device):
        out = torch.empty((*q.shape[:2], _checks.HEAD_DIM_V), dtype=q.dtype, device=q.device)
        max_logits, lse = (torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) for _ in range(2))
        sparse_prefill.flash_mla_sparse_fwd(
            _share("q", q), _share("kv", kv), _share("indices", indices), sm_scale, d_v,
            _share("attn_sink", attn_sink), _share("topk_length", topk_length), out=_share("out", out),
            max_logits=_share("max_logits", max_logits), lse=_share("lse", lse))
        _mark_empty(lse)
    return out, max_logits, lse


def _mark_empty(lse: torch.Tensor) -> None:
    """FlashMLA's convention: +inf instead of -inf where nothing is attended to."""
    lse.nan_to_num_(nan=math.nan, posinf=math.inf, neginf=math.inf)  # one kernel


def _first_plan(arguments: dict[str, Any], q: torch.Tensor, k_cache: torch.Tensor, cache_seqlens: torch.Tensor | None,
                ) -> tuple[torch.Tensor, torch.Tensor]:
    """The plan of a FlashMLASchedMeta at its first use; raises what the call would, before anything is launched."""
    problem = decode.check(arguments)
    topk = sparse_decode.planned_tokens(problem)
    if topk is not None:  # of the lengths only their number counts
        cache_seqlens = torch.zeros(problem.batch, dtype=torch.int32, device=q.device)
    return get_mla_metadata(cache_seqlens.to(q.device), problem.rows, problem.h_kv, topk=topk)


def _size(x: torch.Tensor | None, axis: int) -> int | None:
    return x.shape[axis] if isinstance(x, torch.Tensor) and x.dim() > axis else None


def _check_config(sched: FlashMLASchedMeta, config: FlashMLASchedMeta.Config) -> None:
    if sched.have_initialized and sched.config != config:
        before, now = dataclasses.asdict(sched.config), dataclasses.asdict(config)
        changed = [f"{name} {now[name]}, expected {before[name]}" for name in now if now[name] != before[name]]
        raise ValueError(f"tile_scheduler_metadata: got {', '.join(changed)} as at its first use")


# ---- torch <-> CuPy and NumPy, without copies ----
def _share(name: str, x: Any) -> Any:
    """A tensor as a CuPy or NumPy array of the same memory; None stays None."""
    if x is None:
        return None
    if not isinstance(x, torch.Tensor):
        raise TypeError(f"{name}: got {describe(x)}, expected a torch.Tensor")
    dtype = _NUMPY_DTYPES.get(x.dtype)
    if dtype is None or x.layout != torch.strided or x.device.type not in ("cpu", "cuda"):
        raise TypeError(f"{name}: got a {x.layout} tensor of {x.dtype} on {x.device}, expected a strided one of a "
                        "supported type on cuda or cpu")
    x = x.detach().resolve_neg()  # a pending minus sign is not in the memory
    if not x.is_cuda:
        if x.dtype == torch.float8_e4m3fn:
            return x.view(torch.uint8).numpy()
        return x.view(torch.int16).numpy().view(dtype) if x.dtype == torch.bfloat16 else x.numpy()
    # Not through DLPack: that would order streams that are the same here, and torch refuses it for other devices.
    memory = cupy.cuda.UnownedMemory(x.data_ptr(), x.untyped_storage().nbytes(), x, x.device.index)
    strides = tuple(stride * dtype.itemsize for stride in x.stride())
    return cupy.ndarray(tuple(x.shape), dtype, cupy.cuda.MemoryPointer(memory, 0), strides)


def _tensor(x: Any) -> torch.Tensor:
    """The tensor of an int32 NumPy array, or of a CuPy array that _allocate gave the memory for."""
    if isinstance(x, np.ndarray):
        return torch.from_numpy(x)
    owner = x.data.mem._owner
    offset = x.data.ptr - owner.data_ptr()
    return owner[offset:offset + x.nbytes].view(torch.int32).view(x.shape)


def _torch_runs(device: torch.device) -> ExitStack:
    """Makes CuPy use `device`, torch's current stream on it, and torch's allocator; nothing for the CPU."""
    stack = ExitStack()
    if device.type == "cuda":
        stack.enter_context(ops_device.on_device(device.index))
        stack.enter_context(_cupy_stream(torch.cuda.current_stream(device).cuda_stream))
        stack.enter_context(ops_device.memory_from(_allocate))
    return stack


def _allocate(nbytes: int) -> cupy.cuda.MemoryPointer:
    """Memory of torch's allocator on CuPy's current device, for torch's current stream; freed with the last array."""
    device_id = ops_device.current_device()
    tensor = torch.empty(nbytes, dtype=torch.uint8, device=torch.device("cuda", device_id))
    return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(tensor.data_ptr(), nbytes, tensor, device_id), 0)


def _cupy_stream(address: int) -> Any:
    stream = _streams.get(address)
    if stream is None:
        if len(_streams) >= _MAX_STREAMS:
            _streams.clear()
        if hasattr(cupy.cuda.Stream, "from_external"):
            stream = cupy.cuda.Stream.from_external(_StreamAddress(address))
        else:
            stream = cupy.cuda.ExternalStream(address)
        _streams[address] = stream
    return stream


class _StreamAddress:
    """A stream in the form of the CUDA stream protocol."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address
