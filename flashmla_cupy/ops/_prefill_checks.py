"""Argument checks of sparse prefill, in the manner of _checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashmla_cupy.backends import describe

from ._checks import (
    HEAD_DIM_V,
    HEAD_DIMS_QK,
    check_dtype,
    check_int,
    check_ndim,
    check_q_dtype,
    check_scale,
    check_shape,
    check_slots,
    check_writable,
)

HEADS_PER_BLOCK = 64  # query heads that a CTA works on at once
_MAX_ITEMS = 2**31 - 2**16  # (query token, block of heads) pairs: int32, with room for a step beyond the last


@dataclass(frozen=True)
class SparsePrefillProblem:
    """The sizes of one sparse prefill call, without its data."""

    s_q: int
    h_q: int
    d_qk: int
    s_kv: int
    topk: int
    requests: int | None  # None: no cu_seqlens
    dtype: str
    sm_scale: float

    @property
    def out_shape(self) -> tuple[int, int, int]:
        return self.s_q, self.h_q, HEAD_DIM_V

    @property
    def row_shape(self) -> tuple[int, int]:
        """Of max_logits and lse."""
        return self.s_q, self.h_q

    @property
    def head_blocks(self) -> int:
        return -(-self.h_q // HEADS_PER_BLOCK)

    @property
    def items(self) -> int:
        """Pieces of work: blocks of heads of all query tokens."""
        return self.s_q * self.head_blocks

    @property
    def nothing_to_attend(self) -> bool:
        return self.s_kv == 0 or self.s_q == 0 or self.requests == 0


def check_sparse_prefill(q: Any, kv: Any, indices: Any, sm_scale: Any, d_v: Any, attn_sink: Any, topk_length: Any,
                         cu_seqlens_q: Any, cu_seqlens_kv: Any, out: Any, max_logits: Any, lse: Any,
                         ) -> SparsePrefillProblem:
    """The problem that arrays of one backend describe, or TypeError / ValueError. See flash_mla_sparse_fwd."""
    if check_int("d_v", d_v, 0) != HEAD_DIM_V:
        raise ValueError(f"d_v: got {d_v}, expected {HEAD_DIM_V}")
    dtype = check_q_dtype("q", q)
    check_ndim("q", q, 3, "(s_q, h_q, d_qk)")
    s_q, h_q, d_qk = map(int, q.shape)
    if d_qk not in HEAD_DIMS_QK:
        raise ValueError(f"q: got head dimension {d_qk}, expected {' or '.join(map(str, HEAD_DIMS_QK))}")
    if h_q < 1:
        raise ValueError("q: got 0 heads, expected at least 1")
    check_ndim("kv", kv, 3, "(s_kv, 1, d_qk)")
    s_kv = int(kv.shape[0])
    check_shape("kv", kv, (s_kv, 1, d_qk), "(s_kv, 1, d_qk), d_qk as in q")
    check_dtype("kv", kv, q.dtype)
    check_slots("kv", s_kv)
    topk = _check_indices(indices, s_q)
    sm_scale = check_scale("sm_scale", sm_scale, d_qk)
    if attn_sink is not None:
        check_shape("attn_sink", attn_sink, (h_q,), "(h_q,)")
        check_dtype("attn_sink", attn_sink, np.dtype(np.float32))
    if topk_length is not None:
        check_shape("topk_length", topk_length, (s_q,), "(s_q,)")
    problem = SparsePrefillProblem(s_q, h_q, d_qk, s_kv, topk, _check_offsets(cu_seqlens_q, cu_seqlens_kv), dtype,
                                   sm_scale)
    if problem.items > _MAX_ITEMS:
        raise ValueError(f"q: got {s_q} tokens of {h_q} heads, expected at most {_MAX_ITEMS // problem.head_blocks}")
    _check_results(out, max_logits, lse, problem, q.dtype)
    return problem


def _check_indices(indices: Any, s_q: int) -> int:
    """topk of (s_q, 1, topk) or (s_q, topk) indices."""
    shape = tuple(map(int, indices.shape))
    if len(shape) not in (2, 3) or shape[:-1] != (s_q, 1)[:len(shape) - 1]:
        raise ValueError(f"indices: got shape {shape}, expected ({s_q}, 1, topk), the tokens as in q")
    if shape[-1] < 1:
        raise ValueError("indices: got topk 0, expected at least 1")
    return shape[-1]


def _check_offsets(cu_seqlens_q: Any, cu_seqlens_kv: Any) -> int | None:
    """The number of requests, None without offsets."""
    given = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_kv": cu_seqlens_kv}
    if all(x is None for x in given.values()):
        return None
    for name, other in (("cu_seqlens_q", "cu_seqlens_kv"), ("cu_seqlens_kv", "cu_seqlens_q")):
        if given[name] is None:
            raise TypeError(f"{name}: got None, expected (requests + 1,) offsets with {other} {describe(given[other])}")
    check_ndim("cu_seqlens_q", cu_seqlens_q, 1, "(requests + 1,)")
    count = int(cu_seqlens_q.shape[0])
    if count < 1:
        raise ValueError("cu_seqlens_q: got no offsets, expected at least 1, (requests + 1,)")
    check_shape("cu_seqlens_kv", cu_seqlens_kv, (count,), "(requests + 1,) as cu_seqlens_q")
    return count - 1


def _check_results(out: Any, max_logits: Any, lse: Any, problem: SparsePrefillProblem, dtype: np.dtype) -> None:
    """Arrays that a call writes into, or None."""
    if out is not None:
        check_shape("out", out, problem.out_shape, "(s_q, h_q, d_v)")
        check_dtype("out", out, dtype)
        if out.size and out.strides[-1] != dtype.itemsize:
            raise ValueError(f"out: got stride {out.strides[-1]} bytes along the last axis, expected it contiguous")
        check_writable("out", out)
    for name, x in (("max_logits", max_logits), ("lse", lse)):
        if x is not None:
            check_shape(name, x, problem.row_shape, "(s_q, h_q)")
            check_dtype(name, x, np.dtype(np.float32))
            check_writable(name, x)
