"""Arrays and calls of a sparse benchmark row on the GPU: random FP8 caches, random slots of each request."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashmla_cupy
from flashmla_cupy.kv_format import FORMATS, KVFormat
from flashmla_cupy.ops.dense_decode import mla_workspace_bytes
from flashmla_cupy.testing import inputs, sparse_inputs
from flashmla_cupy.testing.bench_cases import SparseBenchCase

_DEVIATION = 0.1  # of the normal values in q and RoPE, and the scale of the codes
_POWER_OF_TWO_SCALE = 124  # ue8m0: 2^-3
_COLD_BYTES = 200e6  # what the calls of a small row read in turn is many times the L2
_CACHES = (8, 160)  # fewest and most that a small row cycles through


@dataclass
class SparseBenchData:
    """caches: one FP8 pool, or several of equal shape for a row that cycles; extra_*: None without a second list."""

    q: Any  # (batch, s_q, h_q, d_qk)
    caches: list[Any]  # (pages, page_size, 1, bytes_per_token) uint8
    indices: Any  # (batch, s_q, topk) int32
    extra_cache: Any
    extra_indices: Any
    scale: float


def cache_count(case: SparseBenchCase, graph: bool) -> int:
    """How many caches a graph cycles through, so that each call finds the tokens that it reads cold in L2."""
    if not graph:
        return 1
    read_bytes = case.keys * _layout(case).bytes_per_token
    return min(max(_CACHES[0], int(_COLD_BYTES // read_bytes) + 1), _CACHES[1])


def build(case: SparseBenchCase, graph: bool) -> SparseBenchData:
    import cupy as cp

    layout, rng = _layout(case), np.random.default_rng(0)
    tokens = case.batch * case.s_k
    caches = [fp8_cache(cp, layout, tokens, case.page_size, seed) for seed in range(cache_count(case, graph))]
    extra_cache = extra_indices = None
    if case.extra_topk:
        extra_cache = fp8_cache(cp, layout, tokens, case.extra_page_size, 500)
        extra_indices = _indices(cp, case, case.extra_topk, rng)
    q = inputs.random_array(cp, "bfloat16", (case.batch, case.s_q, case.h_q, case.d_qk), 1000, _DEVIATION)
    indices = _indices(cp, case, case.topk, rng)
    return SparseBenchData(q, caches, indices, extra_cache, extra_indices, case.d_qk**-0.5)


def ours(case: SparseBenchCase, data: SparseBenchData) -> Callable[[int], Any]:
    """call(i): one decode on cache i with metadata, outputs and workspace given, returning `out`."""
    import cupy as cp

    lengths = cp.zeros(case.batch, np.int32)  # only the batch counts
    planned = -(-case.topk // 64) * 64 + case.extra_topk
    plan = flashmla_cupy.get_mla_metadata(lengths, case.s_q * case.h_q, 1, case.h_q, True, planned)
    out = cp.empty((case.batch, case.s_q, case.h_q, case.d_v), data.q.dtype)
    lse = cp.empty((case.batch, case.h_q, case.s_q), np.float32)
    workspace = cp.empty(mla_workspace_bytes(case.batch, case.s_q, case.h_q, 1, int(plan[0].shape[0])), np.uint8)

    def call(i: int) -> Any:
        flashmla_cupy.flash_mla_with_kvcache(
            data.q,
            data.caches[i],
            None,
            None,
            case.d_v,
            *plan,
            False,
            True,
            data.indices,
            softmax_scale=data.scale,
            extra_k_cache=data.extra_cache,
            extra_indices=data.extra_indices,
            out=out,
            lse=lse,
            workspace=workspace,
        )
        return out

    return call


def _layout(case: SparseBenchCase) -> KVFormat:
    return next(layout for layout in FORMATS.values() if layout.d_qk == case.d_qk)


def _indices(xp: Any, case: SparseBenchCase, topk: int, rng: np.random.Generator) -> Any:
    """Random slots of each request; request b has the slots from b * s_k on."""
    indices = rng.integers(0, case.s_k, (case.batch, case.s_q, topk), dtype=np.int32)
    return xp.asarray(indices + np.arange(case.batch, dtype=np.int32)[:, None, None] * np.int32(case.s_k))


def fp8_cache(xp: Any, layout: KVFormat, tokens: int, page_size: int, seed: int) -> Any:
    """uint8 (pages, page_size, 1, bytes_per_token) of random codes under one scale."""
    pages, page_bytes, token_bytes = -(-tokens // page_size), layout.page_bytes(page_size), layout.bytes_per_token
    buffer = xp.zeros((pages, page_bytes), np.uint8)
    body = buffer[:, : page_size * token_bytes]
    count = pages * page_size
    if layout.scale == "float32":
        scale = np.full(layout.tiles, _DEVIATION, np.float32).view(np.uint8)
    else:
        scale = np.full(layout.scale_bytes, _POWER_OF_TWO_SCALE, np.uint8)
    parts = [
        sparse_inputs.random_codes(xp, (count, layout.d_nope), 1.0, seed),
        xp.broadcast_to(xp.asarray(scale), (count, layout.scale_bytes)),
        inputs.random_array(xp, "bfloat16", (count, layout.d_rope), seed, _DEVIATION).view(np.uint8),
    ]
    sparse_inputs.write_tokens(body, xp.concatenate(parts, axis=1), layout, page_size)
    return xp.lib.stride_tricks.as_strided(
        body, (pages, page_size, 1, token_bytes), (page_bytes, token_bytes, token_bytes, 1)
    )
