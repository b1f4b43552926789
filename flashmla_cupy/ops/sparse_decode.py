"""Decode over the tokens that indices name, and dense decode over an FP8 cache: check -> select -> plan -> launch.

Arguments travel as a dict by the names of flash_mla_with_kvcache, None where the caller gave nothing. As in
dense_decode, a call whose arrays can be used as they are is planned once and then only fills in pointers; other arrays
are staged first.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import cupy
import numpy as np

from flashmla_cupy import backends
from flashmla_cupy.errors import UnsupportedError
from flashmla_cupy.runtime import params as kernel_params

from . import _checks, _device, _overlap, _plans, combine, sched_meta
from ._checks import HEAD_DIM_V, DecodeProblem, SparseDecodeProblem
from ._select import Problem, experimental_kernels, serves_codes, serves_few_rows
from .sched_meta import KV_BLOCK_TOKENS

_REQUIRED = ("q", "k_cache")
_INTEGERS = ("block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits", "indices", "topk_length",
             "extra_indices", "extra_topk_length")
_OUTPUTS = ("out", "lse", "workspace")
_SCALARS = ("head_dim_v", "causal", "is_fp8_kvcache", "softmax_scale")
_SPARSE = ("indices", "attn_sink", "topk_length", "extra_k_cache", "extra_indices", "extra_topk_length")
_DENSE = ("block_table", "cache_seqlens")
_BOX_TOKENS = 16  # that the copy engine brings together
_LISTS = ("indices", "topk_length", "extra_k_cache", "extra_indices", "extra_topk_length")  # after the cache in params


def serves(arguments: dict[str, Any]) -> bool:
    """Whether a call is one of this module: with indices, over an FP8 cache, or with an argument that goes with them.

    Raises TypeError for an is_fp8_kvcache that is no bool.
    """
    is_fp8 = _checks.check_bool("is_fp8_kvcache", arguments["is_fp8_kvcache"])
    return is_fp8 or any(arguments[name] is not None for name in _SPARSE)


def decode(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """flash_mla_with_kvcache for the calls that this module serves."""
    key = _plans.key_of("sparse_decode", arguments)
    plan = _plans.PLANS.get(key)
    if plan is not None:
        device_id = arguments["q"].data.device_id
        if device_id == _device.current_device():
            return plan.run(arguments)
        with _device.on_device(device_id):
            return plan.run(arguments)
    problem, arrays = prepare(arguments)
    if isinstance(arrays["q"], np.ndarray):
        return _on_host(problem, arrays)
    with _device.on_device(arrays["q"].data.device_id):
        return _on_gpu(problem, arrays, key, arguments)


def prepare(arguments: dict[str, Any]) -> tuple[DecodeProblem, dict[str, Any]]:
    """The problem that a call poses, and its arrays by name; raises for everything that can be wrong with it.

    The problem is a SparseDecodeProblem and `indices` among the arrays, or neither.

    Raises:
        TypeError, ValueError, UnsupportedError: as flash_mla_with_kvcache. Nothing was launched.
    """
    sparse = arguments["indices"] is not None
    for name in _SPARSE:
        if not sparse and arguments[name] is not None:
            raise TypeError(f"{name}: got {backends.describe(arguments[name])}, expected None without indices")
    scalars = {name: arguments[name] for name in _SCALARS}
    scalars["is_fp8_kvcache"] = _checks.check_bool("is_fp8_kvcache", scalars["is_fp8_kvcache"])
    arrays = {name: x for name, x in arguments.items() if name not in (*_SCALARS, *(_DENSE if sparse else _SPARSE))}
    if backends.backend_of("q", arguments["q"]) == "numpy":
        arrays = backends.host_arguments(arrays, _INTEGERS, _OUTPUTS, _REQUIRED)
        problem = _problem(arrays, scalars)
        _check_workspace(problem, arrays, None)
        _overlap.check(arrays, {name: arguments[name] for name in arrays})
        return problem, arrays

    arrays = {name: _on_device(name, x) for name, x in arrays.items()}
    problem = _problem(arrays, scalars)
    _checks.check_same_device(arrays["q"].data.device_id, **arrays)
    _checks.check_element_alignment(**arrays)
    if problem.kv_format is None:
        raise UnsupportedError("indices without is_fp8_kvcache: not supported by flash_mla_with_kvcache on a GPU yet",
                               ["there are kernels for FP8 caches, and for a 16-bit cache without indices"],
                               "pass NumPy arrays to run on the CPU")
    for name in ("k_cache", "extra_k_cache"):
        _check_pages(name, arrays.get(name))
    _check_workspace(problem, arrays, arrays["q"].data.device_id)
    _overlap.check(arrays)
    return problem, arrays


def _check_workspace(p: SparseDecodeProblem, arrays: dict[str, Any], device_id: int | None) -> None:
    if arrays["workspace"] is not None:
        needed = _workspace_bytes(p, arrays, *_parts_and_splits(p, arrays, device_id))
        _checks.check_workspace(arrays["workspace"], needed)


def _check_pages(name: str, cache: Any) -> None:
    """Rows of a token are read 16 bytes at a time."""
    if cache is not None and cache.size and (
            cache.data.ptr % 16 or (cache.shape[0] > 1 and (cache.strides[0] % 16 or cache.strides[0] <= 0))):
        raise ValueError(f"{name}: got address {cache.data.ptr:#x} and a page stride of {cache.strides[0]} bytes, "
                         "expected multiples of 16 bytes")


def planned_tokens(problem: DecodeProblem) -> int | None:
    """`topk` of get_mla_metadata for a call: the KV blocks of both selections of a query, in tokens. None: dense."""
    if not isinstance(problem, SparseDecodeProblem):
        return None
    return -(-problem.topk // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS + problem.extra_topk


def _problem(arrays: dict[str, Any], scalars: dict[str, Any]) -> DecodeProblem:
    looked_at = {name: x for name, x in arrays.items() if name not in ("tile_scheduler_metadata", "workspace")}
    check = _checks.check_sparse_decode if "indices" in arrays else _checks.check_decode
    return check(**looked_at, metadata=arrays["tile_scheduler_metadata"], **scalars)


def _on_device(name: str, x: Any) -> Any:
    if x is None and name not in _REQUIRED:
        return None
    return (backends.as_integers if name in _INTEGERS else backends.as_device)(name, x)


# ---- NumPy backend ----
def _on_host(problem: DecodeProblem, arrays: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    from flashmla_cupy.reference import sparse_decode as reference
    from flashmla_cupy.reference._numerics import cast

    q, k_cache, out, lse = (arrays[name] for name in ("q", "k_cache", "out", "lse"))
    out = np.empty(problem.out_shape, q.dtype) if out is None else out
    lse = np.empty(problem.lse_shape, np.float32) if lse is None else lse
    sparse = isinstance(problem, SparseDecodeProblem)
    if not sparse and 0 not in q.shape:
        _checks.check_pages(arrays["block_table"], arrays["cache_seqlens"], problem)
    if problem.nothing_to_attend or 0 in q.shape:
        out[...], lse[...] = 0, -np.inf
        return out, lse
    if sparse:
        exact_out, exact_lse = reference.attend(
            q, k_cache, arrays["indices"], HEAD_DIM_V, softmax_scale=problem.softmax_scale,
            **{name: arrays[name] for name in _SPARSE if name != "indices"})
    else:
        exact_out, exact_lse = reference.attend_paged(
            q, k_cache, arrays["block_table"], arrays["cache_seqlens"], HEAD_DIM_V,
            softmax_scale=problem.softmax_scale, causal=problem.causal)
    out[...], lse[...] = cast(exact_out, q.dtype), cast(exact_lse, np.float32)
    return out, lse


# ---- staging: what the kernels cannot read as it is ----
def _on_gpu(p: DecodeProblem, arrays: dict[str, Any], key: tuple, arguments: dict[str, Any]) -> tuple[Any, Any]:
    """Plans, stages and launches, on q's device, the current. key, arguments: of the call as it came."""
    stream_ptr = _device.current_stream_ptr()
    with _device.temporaries(stream_ptr):
        staged = {name: _staged(name, x, stream_ptr) for name, x in arrays.items()}
        out = arrays["out"]
        if out is not None and not _device.loads_16_bytes(out):
            staged["out"] = cupy.empty(p.out_shape, out.dtype)
        plan = _Plan(p, staged)
        if all(x is arguments[name] for name, x in staged.items()):
            _plans.remember(key, plan)
        result = plan.run(staged)
        if staged["out"] is not out:
            _device.assign(out, staged["out"])
            result = out, result[1]
        del staged
    return result


def _staged(name: str, x: Any, stream_ptr: int) -> Any:
    """`x` as the kernels read it: q by rows of 16 bytes, int32 indices along a contiguous last axis."""
    if x is None or name in _OUTPUTS or name in ("k_cache", "extra_k_cache"):
        return x
    if isinstance(x, np.ndarray):
        x = _device.upload(name, x, stream_ptr)
    if name == "q":
        return x if _device.loads_16_bytes(x) else _device.contiguous(x)
    if name in ("indices", "extra_indices"):
        x = x[:, :, 0] if x.ndim == 4 else x
        if x.dtype != np.int32:
            return _device.as_int32(x)
        return x if x.shape[-1] == 1 or x.strides[-1] == 4 else _device.contiguous(x)
    return _device.as_vector(x, np.float32 if name == "attn_sink" else np.int32,
                             16 if name == "tile_scheduler_metadata" else 1)


# ---- plan and launch ----
# The kernel for few query rows gets at most those of one mma, and so of one CTA: there it takes 177 us and the kernel
# for 64 rows 316 (dense 128,16,1,8192). Two CTAs are hardly faster: 307.9 us against 318.4 (dense 128,32,1,8192).
FEW_ROWS = 16
# The kernel that multiplies codes as they are takes up to a fifth less time a KV block. With 1 block a part it takes
# 14.6 us and the other 14.0 (graph 1,128,1,2048), with 2 blocks 18.3 and 18.1 (2,128,2,2048), 3.9 blocks 22.9 and 23.4
# (8,128,1,2048), 7.75 blocks 30.2 and 32.4 (16,128,1,2048), 32 blocks 84.8 and 95.8 (128,64,1,2048), 256 blocks 497.2
# and 621.6 (dense 128,128,1,8192).
CODES_BLOCKS = 7
_codes: bool | None = None  # None: by the number of blocks
_crossover = False


def variant(sparse: bool, rows: int, few_rows: bool = False, codes: bool = False, crossover: bool = False) -> str:
    """Of the kernel. rows: the query rows that attend to the same keys, heads (dense: of all query tokens).

    few_rows: whether the kernel for few rows may be chosen; the others pad the rows to 64, and are slower than reading
    the cache. codes: whether the one that multiplies codes may be, and is faster; it and the one for few rows do not
    dequantize into shared memory, as the others do. There the crossover, by which two blocks of 64 rows share that as a
    cluster, loses on every measured row (docs/performance.md): `with_crossover` alone selects it.
    """
    if crossover and -(-rows // sched_meta.QUERY_ROWS_PER_BLOCK) % 2 == 0:
        return "crossover" if sparse else "paged_crossover"
    if few_rows and not crossover and rows <= FEW_ROWS:
        return "few_indices" if sparse else "few_paged"
    if codes and not crossover:
        return "codes" if sparse else "paged_codes"
    return "indices" if sparse else "paged"


def _variant_of(p: DecodeProblem, parts: int) -> str:
    """For a plan of that many SM parts."""
    sparse = isinstance(p, SparseDecodeProblem)
    blocks = p.batch * -(-(planned_tokens(p) if sparse else p.max_seqlen) // KV_BLOCK_TOKENS)
    codes = blocks >= CODES_BLOCKS * parts if _codes is None else _codes
    return variant(sparse, p.h_q if sparse else p.rows, serves_few_rows(p.dtype, p.d_qk),
                   codes and serves_codes(p.dtype, p.d_qk), _crossover)


def _partial_bytes(p: DecodeProblem, parts: int) -> tuple[int, int]:
    """Bytes of the partial outputs, and of all of a partial result."""
    sizes = _device.partial_bytes if _variant_of(p, parts).startswith("few") else _device.half_partial_bytes
    return sizes(parts, p.s_q * p.h_q)


def with_codes(wanted: bool) -> contextlib.AbstractContextManager[None]:
    """Within, the kernel that multiplies codes is chosen wherever it may be, or nowhere: to validate and to compare."""
    return _plans.while_set(globals(), "_codes", wanted)


def what_is_rounded(sparse: bool, rows: int, d_qk: int) -> str:
    """By the kernel that a call gets within `with_codes`: "keys" to bfloat16, "scores" (sums of products of codes keep
    13 bits below the largest), or "nothing" before the softmax."""
    few, codes = serves_few_rows("bfloat16", d_qk), bool(_codes) and serves_codes("bfloat16", d_qk)
    name = variant(sparse, rows, few, codes, _crossover)
    return "nothing" if name.startswith("few") else "scores" if name.endswith("codes") else "keys"


@contextlib.contextmanager
def with_crossover() -> Iterator[None]:
    """Within, the CTAs of an even number of head blocks share the dequantizing: to measure what that is worth."""
    with _plans.while_set(globals(), "_crossover", True), experimental_kernels():
        yield


def _parts_and_splits(p: DecodeProblem, arrays: dict[str, Any], device_id: int | None) -> tuple[int, bool]:
    """The number of SM parts, and whether a request may be split; if not, each part has as many whole ones.

    Metadata that are given may split any request of more than one block. Where lists of indices are equally long and a
    plan by their shape splits none, no metadata are better than that.
    """
    metadata, sparse = arrays["tile_scheduler_metadata"], isinstance(p, SparseDecodeProblem)
    if metadata is not None:
        parts = metadata.shape[0]
    elif sparse:
        parts = sched_meta.num_sparse_sm_parts(sched_meta.sm_count(device_id), p.s_q, p.h_q)
    else:
        parts = sched_meta.num_sm_parts(sched_meta.sm_count(device_id), p.h_kv, p.rows, p.batch)
    tokens = planned_tokens(p) if sparse else p.max_seqlen
    if parts == 1 or tokens <= KV_BLOCK_TOKENS:
        return parts, False
    by_shape = sparse and (metadata is None or arrays["topk_length"] is arrays["extra_topk_length"] is None)
    return parts, not (by_shape and sched_meta.cuts_nothing(p.batch, parts, tokens))


def _workspace_bytes(p: DecodeProblem, arrays: dict[str, Any], parts: int, splits: bool) -> int:
    if not splits or p.nothing_to_attend or p.batch * p.s_q == 0:
        return 0
    plan = sched_meta.plan_bytes(p.batch, parts) if arrays["tile_scheduler_metadata"] is None else 0
    return _partial_bytes(p, parts)[1] + plan


class _Plan:
    """One call worked out but for its pointers: kernels, grids, parameter bytes, workspace layout."""

    def __init__(self, p: DecodeProblem, arrays: dict[str, Any]) -> None:
        """`arrays`: the call's arguments by name, checked and directly usable, all on the current device."""
        q, metadata, out, lse = (arrays[name] for name in ("q", "tile_scheduler_metadata", "out", "lse"))
        device_id, self.problem, self.dtype = q.data.device_id, p, q.dtype
        self.overlap, self.sparse = _overlap.watch(arrays), isinstance(p, SparseDecodeProblem)
        self.empty = p.nothing_to_attend or 0 in q.shape
        if self.empty:
            return
        self.parts, self.splits = _parts_and_splits(p, arrays, device_id)
        self.plans_inside = self.splits and metadata is None
        self.o_bytes, self.plan_offset = _partial_bytes(p, self.parts)
        self.total_bytes = _workspace_bytes(p, arrays, self.parts, self.splits)
        self.planned_tokens = planned_tokens(p)

        rows, keys, self.maps = p.h_q if self.sparse else p.rows, _variant_of(p, self.parts), None
        few = keys.startswith("few")
        head_blocks = 1 if few else -(-rows // sched_meta.QUERY_ROWS_PER_BLOCK)
        self.kernel = _device.get_kernel(Problem(f"sparse_decode.{keys}", p.dtype, p.d_qk, HEAD_DIM_V), device_id)
        self.grid = (head_blocks, p.s_q if self.sparse else 1, self.parts)
        float32 = np.dtype(np.float32)
        out_strides = _device.strides_of(out, p.out_shape, q.dtype)[:3]
        strides = {**_device.element_strides("out", out_strides, q.dtype, "batch token head"),
                   **_device.element_strides("lse", _device.strides_of(lse, p.lse_shape, float32), float32,
                                             "batch head token")}
        sizes = dict(batch=p.batch, s_q=p.s_q, num_sm_parts=self.parts)
        magic, shift = kernel_params.divisor(p.h_q)
        fields = dict(**strides, **sizes, **_device.element_strides("q", q.strides[:3], q.dtype, "batch token head"),
                      h_q=p.h_q, h_q_magic=magic, h_q_shift=shift, scale_log2=p.softmax_scale * math.log2(math.e))
        if self.sparse:
            fields |= _keys("main", arrays["k_cache"], arrays["indices"])
            fields |= _keys("extra", arrays["extra_k_cache"], arrays["extra_indices"])
        else:
            table = arrays["block_table"]
            fields |= dict(_cache("main", arrays["k_cache"]), causal=p.causal, max_seqlen=p.max_seqlen,
                           block_table_stride=0 if table is None else table.strides[0] // 4)
            if keys == "paged_codes" and (table is None or p.page_size % _BOX_TOKENS == 0):
                self.maps = _device.TensorMaps(_map_arguments(arrays["k_cache"]))
                fields["whole_boxes"] = 1
        self.params = _device.ParamTemplate("SparseDecodeParams", **fields)
        if self.splits:
            self.combine = combine.AfterSplit(p.batch, self.parts, p.dtype, not few, device_id,
                                              dict(**strides, s_q=p.s_q, heads_per_kv=p.h_q, h_kv=1))

    def run(self, arrays: dict[str, Any]) -> tuple[cupy.ndarray, cupy.ndarray]:
        """Launches on the current device, which is q's; the arrays have the signatures that the plan was made for.

        Raises ValueError where what the call writes overlaps another argument.
        """
        p, out, lse, workspace = self.problem, arrays["out"], arrays["lse"], arrays["workspace"]
        pointer, q_ptr, cache_ptr = _device.pointer, arrays["q"].data.ptr, arrays["k_cache"].data.ptr
        metadata_ptr, splits_ptr = pointer(arrays["tile_scheduler_metadata"]), pointer(arrays["num_splits"])
        if self.sparse:
            lists, sink_ptr = tuple(pointer(arrays[name]) for name in _LISTS), pointer(arrays["attn_sink"])
            table_ptr = lengths_ptr = 0
        else:
            lists, sink_ptr = (0,) * len(_LISTS), 0
            table_ptr, lengths_ptr = pointer(arrays["block_table"]), pointer(arrays["cache_seqlens"])
        if self.overlap is not None:
            addresses = (q_ptr, cache_ptr, *lists, sink_ptr, table_ptr, lengths_ptr, metadata_ptr, splits_ptr,
                         pointer(out), pointer(lse), pointer(workspace))
            if addresses not in self.overlap.known:
                self.overlap.look(addresses, arrays)
        if out is None:
            out = cupy.empty(p.out_shape, self.dtype)
        if lse is None:
            lse = cupy.empty(p.lse_shape, np.float32)
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
            metadata_offset, splits_offset, _ = sched_meta.plan_offsets(p.batch, self.parts)
            metadata_ptr, splits_ptr = base + metadata_offset, base + splits_offset
            sched_meta.launch_plan(p.batch, self.parts, lengths_ptr, metadata_ptr, splits_ptr, base, stream_ptr,
                                   self.planned_tokens)

        out_ptr, lse_ptr = out.data.ptr, lse.data.ptr
        params = self.params.fill(cache_ptr, *lists, q_ptr, out_ptr, lse_ptr, o_partial, lse_partial, metadata_ptr,
                                  sink_ptr, table_ptr, lengths_ptr,
                                  head=None if self.maps is None else self.maps[cache_ptr])
        self.kernel.launch(self.grid, params, pdl=True, stream_ptr=stream_ptr)
        if self.splits:
            self.combine.launch(o_partial, lse_partial, out_ptr, lse_ptr, metadata_ptr, sink_ptr, stream_ptr)
        return out, lse


def _map_arguments(cache: Any) -> dict[str, Any]:
    """A cache of the 656-byte layout as the copy engine sees it, innermost first: 16-bit pieces of a token | tokens of
    a page | pages, between them axes of one."""
    pages, page_size, _, token_bytes = cache.shape
    page_stride = cache.strides[0] if pages > 1 else token_bytes
    return dict(dtype_name="bfloat16", shape=(token_bytes // 2, page_size, 1, 1, pages),
                strides_bytes=(token_bytes, token_bytes, token_bytes, page_stride), box=(64, _BOX_TOKENS, 1, 1, 1))


def _keys(prefix: str, cache: Any, indices: Any) -> dict[str, int]:
    """The fields of a SparseKeys member but for its pointers; all zero where there is no such list."""
    if cache is None:
        return {}
    fields = dict(topk=indices.shape[-1], indices_stride_batch=indices.strides[0] // 4,
                  indices_stride_token=indices.strides[1] // 4)
    return _cache(prefix, cache) | {f"{prefix}.{name}": value for name, value in fields.items()}


def _cache(prefix: str, cache: Any) -> dict[str, int]:
    """The fields of a SparseKeys member about the cache."""
    pages, page_size = cache.shape[:2]
    magic, shift = kernel_params.divisor(max(page_size, 1))
    return {f"{prefix}.page_stride": cache.strides[0], f"{prefix}.num_pages": pages, f"{prefix}.page_size": page_size,
            f"{prefix}.page_size_magic": magic, f"{prefix}.page_size_shift": shift}
