"""Argument checks. Every error names the argument, what it got and what was expected, before anything is launched.

Messages read "argument: got ..., expected ...". TypeError: a wrong type or dtype; ValueError: a wrong value or shape.
The functions look at shapes, dtypes and strides only, so they serve NumPy and CuPy arrays alike and never synchronise.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import ml_dtypes
import numpy as np

from flashmla_cupy.backends import describe
from flashmla_cupy.kv_format import FORMATS, KVFormat

HEAD_DIM_V = 512
HEAD_DIMS_QK = (512, 576)
PAGE_SIZES = (16, 32, 64, 128, 256)
METADATA_WIDTH = 8  # int32 of one row of the tile-scheduler metadata
MAX_SM_PARTS = 65535  # the grid's third axis
Q_DTYPES = {"bfloat16": np.dtype(ml_dtypes.bfloat16), "float16": np.dtype(np.float16)}
FP8_CACHE_DTYPES = (np.dtype(np.uint8), np.dtype(np.int8), np.dtype(ml_dtypes.float8_e4m3fn))
_FP8_FORMATS = {layout.d_qk: layout for layout in FORMATS.values()}
_LAST_AXES = "h_kv, d_qk or bytes per token"
_INT32_MAX = 2**31 - 1
_FLOAT32_MIN, _FLOAT32_MAX = float(np.finfo(np.float32).smallest_subnormal), float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class DecodeProblem:
    """The sizes of one decode call, without its data."""

    batch: int
    s_q: int
    h_q: int
    h_kv: int
    d_qk: int
    dtype: str  # "bfloat16" | "float16"
    pages: int  # pages of the pool; contiguous cache: batch
    page_size: int  # tokens of a page; contiguous cache: s_k
    table_width: int | None  # entries of a block-table row; None: contiguous cache
    causal: bool
    softmax_scale: float
    kv_format: KVFormat | None = None  # of an FP8 cache; None: the cache has q's type

    @property
    def heads_per_kv(self) -> int:
        return self.h_q // self.h_kv

    @property
    def rows(self) -> int:
        """Query rows that share one KV head."""
        return self.s_q * self.heads_per_kv

    @property
    def max_seqlen(self) -> int:
        """Tokens that the block table (or the contiguous cache) can hold."""
        return min(self.page_size * (1 if self.table_width is None else self.table_width), _INT32_MAX)

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        return self.batch, self.s_q, self.h_q, HEAD_DIM_V

    @property
    def lse_shape(self) -> tuple[int, int, int]:
        return self.batch, self.h_q, self.s_q

    @property
    def nothing_to_attend(self) -> bool:
        return self.max_seqlen == 0 or self.pages == 0


@dataclass(frozen=True)
class SparseDecodeProblem(DecodeProblem):
    """The sizes of one decode call with indices; table_width is None and causal False."""

    topk: int = 0  # indices of a query token
    extra_pages: int = 0  # of the second cache, if there is one
    extra_page_size: int = 0
    extra_topk: int = 0

    @property
    def max_seqlen(self) -> int:
        """Most keys of a query token."""
        return min(self.topk + self.extra_topk, _INT32_MAX)

    @property
    def nothing_to_attend(self) -> bool:
        return self.pages * self.page_size == 0 and self.extra_pages * self.extra_page_size == 0


def check_int(name: str, value: Any, minimum: int) -> int:
    """`value` as an int of at least `minimum`."""
    try:
        if isinstance(value, (bool, np.bool_)):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise TypeError(f"{name}: got {describe(value)}, expected an int") from None
    if not minimum <= number <= _INT32_MAX:
        raise ValueError(f"{name}: got {number}, expected a value from {minimum} to {_INT32_MAX}")
    return number


def check_bool(name: str, value: Any) -> bool:
    if not isinstance(value, (bool, np.bool_)):
        raise TypeError(f"{name}: got {describe(value)}, expected a bool")
    return bool(value)


def check_scale(name: str, value: Any, d_qk: int) -> float:
    """`value` as a float, d_qk ** -0.5 for None."""
    if value is None:
        return d_qk**-0.5
    if isinstance(value, (bool, np.bool_, str, bytes)) or getattr(value, "shape", ()) != ():
        raise TypeError(f"{name}: got {describe(value)}, expected a float")
    if hasattr(value, "shape") and not isinstance(value, (np.generic, np.ndarray)):
        raise TypeError(f"{name}: got {describe(value)}, expected a float on the host")  # float() would synchronise
    try:
        scale = float(value)
    except OverflowError:
        scale = math.inf
    except (TypeError, ValueError):
        raise TypeError(f"{name}: got {describe(value)}, expected a float") from None
    if not (math.isfinite(scale) and scale > 0):
        raise ValueError(f"{name}: got {scale}, expected a positive finite number")
    if not _FLOAT32_MIN <= scale * math.log2(math.e) <= _FLOAT32_MAX:  # as the kernels take it
        raise ValueError(f"{name}: got {scale}, expected a number that float32 holds, also times log2(e)")
    return scale


def check_shape(name: str, x: Any, expected: tuple[int, ...], meaning: str) -> None:
    if tuple(x.shape) != expected:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {expected} {meaning}")


def check_ndim(name: str, x: Any, ndim: int, meaning: str) -> None:
    if len(x.shape) != ndim:
        raise ValueError(f"{name}: got shape {tuple(x.shape)}, expected {ndim} axes {meaning}")


def check_dtype(name: str, x: Any, expected: np.dtype) -> None:
    if x.dtype != expected:
        raise TypeError(f"{name}: got dtype {x.dtype}, expected {expected}")


def check_q_dtype(name: str, x: Any) -> str:
    """The name of a 16-bit float type."""
    if x.dtype not in Q_DTYPES.values():
        raise TypeError(f"{name}: got dtype {x.dtype}, expected bfloat16 (ml_dtypes) or float16")
    return x.dtype.name


def check_writable(name: str, x: Any) -> None:
    """An output array: no element twice, not read-only, elements on their natural boundaries."""
    if isinstance(x, np.ndarray) and not x.flags.writeable:
        raise ValueError(f"{name}: got a read-only array, expected a writable one")
    if x.size == 0:
        return  # strides of no elements mean nothing; CuPy and torch fill them with zeros
    extent = x.dtype.itemsize
    axes = [(abs(stride), length) for stride, length in zip(x.strides, x.shape, strict=True) if length > 1]
    for stride, length in sorted(axes):
        if stride < extent:
            raise ValueError(f"{name}: got strides {x.strides} whose elements overlap, expected separate elements")
        extent = stride * (length - 1) + extent


# ---- the parts of a decode call ----
def check_query(q: Any, head_dim_v: Any) -> str:
    """The name of q's type, of a (batch, s_q, h_q, d_qk) array."""
    if check_int("head_dim_v", head_dim_v, 0) != HEAD_DIM_V:
        raise ValueError(f"head_dim_v: got {head_dim_v}, expected {HEAD_DIM_V}")
    dtype = check_q_dtype("q", q)
    check_ndim("q", q, 4, "(batch, s_q, h_q, d_qk)")
    if int(q.shape[3]) not in HEAD_DIMS_QK:
        raise ValueError(f"q: got head dimension {q.shape[3]}, expected {' or '.join(map(str, HEAD_DIMS_QK))}")
    return dtype


def check_cache(name: str, cache: Any, q: Any, is_fp8: bool, axes: str) -> KVFormat | None:
    """The layout of an FP8 cache, None for one of q's type. axes: what the axes mean, for messages."""
    check_ndim(name, cache, 4, axes)
    d_qk = int(q.shape[3])
    if not is_fp8:
        if cache.dtype in FP8_CACHE_DTYPES:
            raise TypeError(f"is_fp8_kvcache: got False, expected True with {name} of dtype {cache.dtype}")
        check_dtype(name, cache, q.dtype)
        if int(cache.shape[3]) != d_qk:
            raise ValueError(f"{name}: got head dimension {cache.shape[3]}, expected {d_qk} as in q")
        return None
    if cache.dtype not in FP8_CACHE_DTYPES:
        raise TypeError(f"{name}: got dtype {cache.dtype}, expected uint8 (or int8, float8_e4m3fn) with "
                        "is_fp8_kvcache=True")
    if q.dtype != Q_DTYPES["bfloat16"]:
        raise TypeError(f"q: got dtype {q.dtype}, expected bfloat16 with an FP8 cache")
    layout = _FP8_FORMATS[d_qk]
    if int(cache.shape[3]) != layout.bytes_per_token:
        raise ValueError(f"{name}: got {cache.shape[3]} bytes per token, expected {layout.bytes_per_token} with "
                         f"is_fp8_kvcache=True and head dimension {d_qk} of q")
    if int(cache.shape[2]) != 1:
        raise ValueError(f"{name}: got {cache.shape[2]} heads, expected 1 in an FP8 cache")
    token, element = cache.strides[1], cache.strides[3]
    if cache.size and (element != 1 or (cache.shape[1] > 1 and token != layout.bytes_per_token)):
        raise ValueError(f"{name}: got strides of {token} bytes from token to token and {element} from byte to byte, "
                         f"expected {layout.bytes_per_token} and 1: a page of an FP8 cache is one run of bytes")
    return layout


def check_heads(q: Any, k_cache: Any) -> tuple[int, int]:
    h_q, h_kv = int(q.shape[2]), int(k_cache.shape[2])
    if h_kv < 1:
        raise ValueError("k_cache: got 0 heads, expected at least 1")
    if h_q < 1 or h_q % h_kv:
        raise ValueError(f"q: got {h_q} heads, expected a positive multiple of k_cache's {h_kv}")
    return h_q, h_kv


def check_metadata(metadata: Any, num_splits: Any, batch: int) -> None:
    if (metadata is None) != (num_splits is None):
        missing, given = ("num_splits", "tile_scheduler_metadata")[::1 if num_splits is None else -1]
        raise TypeError(f"{missing}: got None, expected the array that get_mla_metadata returned with {given}")
    if metadata is not None:
        check_ndim("tile_scheduler_metadata", metadata, 2, f"(num_sm_parts, {METADATA_WIDTH})")
        parts, width = map(int, metadata.shape)
        if width != METADATA_WIDTH or not 1 <= parts <= MAX_SM_PARTS:
            raise ValueError(f"tile_scheduler_metadata: got shape {(parts, width)}, expected 1 to {MAX_SM_PARTS} rows "
                             f"(SM parts) of {METADATA_WIDTH}, as get_mla_metadata returns them")
        check_shape("num_splits", num_splits, (batch + 1,), "(batch + 1,)")


def check_results(out: Any, lse: Any, problem: DecodeProblem, dtype: np.dtype) -> None:
    """Arrays that a call writes into, or None."""
    if out is not None:
        check_shape("out", out, problem.out_shape, "(batch, s_q, h_q, head_dim_v)")
        check_dtype("out", out, dtype)
        if out.size and out.strides[-1] != dtype.itemsize:
            raise ValueError(f"out: got stride {out.strides[-1]} bytes along the last axis, expected it contiguous")
        check_writable("out", out)
    if lse is not None:
        check_shape("lse", lse, problem.lse_shape, "(batch, h_q, s_q)")
        check_dtype("lse", lse, np.dtype(np.float32))
        check_writable("lse", lse)


def check_decode(q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: Any, metadata: Any,
                 num_splits: Any, causal: Any, softmax_scale: Any, out: Any, lse: Any,
                 is_fp8_kvcache: bool = False) -> DecodeProblem:
    """The problem that arrays of one backend describe, or TypeError / ValueError. See flash_mla_with_kvcache."""
    causal = check_bool("causal", causal)
    dtype = check_query(q, head_dim_v)
    layout = check_cache("k_cache", k_cache, q, is_fp8_kvcache,
                         f"(batch, s_k, {_LAST_AXES})" if block_table is None else f"(pages, page_size, {_LAST_AXES})")
    h_q, h_kv = check_heads(q, k_cache)
    batch, s_q, _, d_qk = map(int, q.shape)
    pages, page_size = map(int, k_cache.shape[:2])
    softmax_scale = check_scale("softmax_scale", softmax_scale, d_qk)

    table_width = None
    if block_table is not None:
        check_ndim("block_table", block_table, 2, "(batch, pages of the longest request)")
        if int(block_table.shape[0]) != batch:
            raise ValueError(f"block_table: got {block_table.shape[0]} rows, expected {batch}, the batch of q")
        if page_size < 1 if layout is not None else page_size not in PAGE_SIZES:
            expected = "at least 1" if layout is not None else f"one of {', '.join(map(str, PAGE_SIZES))}"
            raise ValueError(f"k_cache: got page size {page_size}, expected {expected}")
        table_width = int(block_table.shape[1])
    elif pages != batch:
        raise ValueError(f"k_cache: got batch {pages} with block_table=None, expected {batch}, the batch of q")
    if cache_seqlens is None:
        raise TypeError("cache_seqlens: got None, expected int32 lengths of shape (batch,)")
    check_shape("cache_seqlens", cache_seqlens, (batch,), "(batch,)")
    check_metadata(metadata, num_splits, batch)
    problem = DecodeProblem(batch, s_q, h_q, h_kv, d_qk, dtype, pages, page_size, table_width, causal, softmax_scale,
                            layout)
    check_results(out, lse, problem, q.dtype)
    return problem


def check_sparse_decode(q: Any, k_cache: Any, head_dim_v: Any, metadata: Any, num_splits: Any, causal: Any,
                        is_fp8_kvcache: bool, indices: Any, softmax_scale: Any, attn_sink: Any, topk_length: Any,
                        extra_k_cache: Any, extra_indices: Any, extra_topk_length: Any, out: Any, lse: Any,
                        ) -> SparseDecodeProblem:
    """The same for a call with indices."""
    if check_bool("causal", causal):
        raise ValueError("causal: got True, expected False with indices: they say what each query attends to")
    dtype = check_query(q, head_dim_v)
    layout = check_cache("k_cache", k_cache, q, is_fp8_kvcache, f"(pages, page_size, {_LAST_AXES})")
    h_q, h_kv = check_heads(q, k_cache)
    batch, s_q, _, d_qk = map(int, q.shape)
    pages, page_size = map(int, k_cache.shape[:2])
    check_slots("k_cache", pages * page_size)
    topk = _check_indices("indices", indices, batch, s_q, h_kv)
    extra = _check_extra(q, h_kv, is_fp8_kvcache, extra_k_cache, extra_indices, extra_topk_length)
    if topk_length is not None:
        check_shape("topk_length", topk_length, (batch,), "(batch,)")
    if attn_sink is not None:
        check_shape("attn_sink", attn_sink, (h_q,), "(h_q,)")
        check_dtype("attn_sink", attn_sink, np.dtype(np.float32))
    softmax_scale = check_scale("softmax_scale", softmax_scale, d_qk)
    check_metadata(metadata, num_splits, batch)
    problem = SparseDecodeProblem(batch, s_q, h_q, h_kv, d_qk, dtype, pages, page_size, None, False, softmax_scale,
                                  layout, topk=topk, **extra)
    check_results(out, lse, problem, q.dtype)
    return problem


def check_slots(name: str, slots: int) -> None:
    """Of what int32 indices name: so that an index beyond int32, which becomes the largest that it holds, is none."""
    if slots > _INT32_MAX:
        raise ValueError(f"{name}: got {slots} tokens, expected at most {_INT32_MAX}, which int32 indices can name")


def _check_extra(q: Any, h_kv: int, is_fp8: bool, cache: Any, indices: Any, lengths: Any) -> dict[str, int]:
    """The fields of a SparseDecodeProblem about the second cache; none where there is none."""
    if cache is None:
        for name, given in (("extra_indices", indices), ("extra_topk_length", lengths)):
            if given is not None:
                raise TypeError(f"{name}: got {describe(given)}, expected None without extra_k_cache")
        return {}
    check_cache("extra_k_cache", cache, q, is_fp8, f"(pages, page_size, {_LAST_AXES})")
    check_slots("extra_k_cache", int(cache.shape[0]) * int(cache.shape[1]))
    if int(cache.shape[2]) != h_kv:
        raise ValueError(f"extra_k_cache: got {cache.shape[2]} heads, expected {h_kv} as in k_cache")
    if indices is None:
        raise TypeError("extra_indices: got None, expected int32 indices into extra_k_cache")
    batch, s_q = map(int, q.shape[:2])
    topk = _check_indices("extra_indices", indices, batch, s_q, h_kv)
    if lengths is not None:
        check_shape("extra_topk_length", lengths, (batch,), "(batch,)")
    return dict(extra_pages=int(cache.shape[0]), extra_page_size=int(cache.shape[1]), extra_topk=topk)


def _check_indices(name: str, indices: Any, batch: int, s_q: int, h_kv: int) -> int:
    """topk of (batch, s_q, topk) or (batch, s_q, h_kv, topk) indices."""
    shape = tuple(map(int, indices.shape))
    if len(shape) not in (3, 4) or shape[:-1] != (batch, s_q, h_kv)[:len(shape) - 1]:
        raise ValueError(f"{name}: got shape {shape}, expected {(batch, s_q)} and topk as in q, or "
                         f"{(batch, s_q, h_kv)} and topk")
    if shape[-1] < 1:
        raise ValueError(f"{name}: got topk 0, expected at least 1")
    return shape[-1]


def check_workspace(workspace: Any, needed_bytes: int) -> None:
    check_ndim("workspace", workspace, 1, "(elements,)")
    if workspace.dtype not in (np.dtype(np.uint8), np.dtype(np.float32)):
        raise TypeError(f"workspace: got dtype {workspace.dtype}, expected uint8 or float32")
    if workspace.size > 1 and workspace.strides[0] != workspace.dtype.itemsize:
        raise ValueError(f"workspace: got stride {workspace.strides[0]} bytes, expected a contiguous array")
    check_writable("workspace", workspace)
    if workspace.nbytes < needed_bytes:
        raise ValueError(f"workspace: got {workspace.nbytes} bytes, expected at least {needed_bytes} "
                         "(mla_workspace_bytes tells)")
    address = workspace.ctypes.data if isinstance(workspace, np.ndarray) else workspace.data.ptr
    if needed_bytes and address % 16:
        raise ValueError(f"workspace: got address {address:#x}, expected a multiple of 16 bytes")


# ---- host arrays only ----
def check_pages(block_table: Any, cache_seqlens: Any, problem: DecodeProblem) -> None:
    """Every page within a request's length is one of the cache. None: a contiguous cache."""
    if block_table is None:
        return
    lengths = np.clip(np.asarray(cache_seqlens).astype(np.int64), 0, problem.max_seqlen)
    reached = np.arange(block_table.shape[1]) < -(-lengths // problem.page_size)[:, None]
    outside = reached & ((block_table < 0) | (block_table >= problem.pages))
    if outside.any():
        request, entry = map(int, np.argwhere(outside)[0])
        pages = f"pages from 0 to {problem.pages - 1}" if problem.pages else "no tokens, for the cache has no pages"
        raise ValueError(f"block_table: got page {block_table[request, entry]} as entry {entry} of request {request} "
                         f"({lengths[request]} tokens), expected {pages}")


# ---- device arrays only ----
def check_same_device(device_id: int, **arrays: Any) -> None:
    for name, x in arrays.items():
        if x is not None and not isinstance(x, np.ndarray) and x.data.device_id != device_id:
            raise ValueError(f"{name}: got an array on device {x.data.device_id}, expected device {device_id} as q")


def check_element_alignment(**arrays: Any) -> None:
    """Every element on its natural boundary: a byte-shifted view of a buffer would fault on the device."""
    for name, x in arrays.items():
        if x is None or isinstance(x, np.ndarray) or x.size == 0:
            continue
        size = x.dtype.itemsize
        strides = [stride for stride, length in zip(x.strides, x.shape, strict=True) if length > 1]
        if x.data.ptr % size or any(stride % size for stride in strides):
            raise ValueError(f"{name}: got address {x.data.ptr:#x} and strides {x.strides} bytes, expected multiples "
                             f"of the {size}-byte element")


def check_cache_layout(k_cache: Any) -> None:
    """What the tensor map of the cache needs. The cache is never copied silently."""
    token, head, page = k_cache.strides[1], k_cache.strides[2], k_cache.strides[0]
    if k_cache.strides[3] != k_cache.dtype.itemsize:
        raise ValueError(f"k_cache: got stride {k_cache.strides[3]} bytes along the last axis, expected it contiguous")
    if k_cache.data.ptr % 16:
        raise ValueError(f"k_cache: got address {k_cache.data.ptr:#x}, expected a multiple of 16 bytes (TMA)")
    for axis, stride, length in (("page", page, k_cache.shape[0]), ("token", token, k_cache.shape[1]),
                                 ("head", head, k_cache.shape[2])):
        if length > 1 and (stride % 16 or not 0 < stride < 1 << 40):
            raise ValueError(f"k_cache: got a {axis} stride of {stride} bytes, expected a positive multiple of 16 "
                             "(TMA)")
