"""Arrays of a benchmark row on the GPU: random data, shuffled pages, several caches for the small rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashmla_cupy.kv_format import V32
from flashmla_cupy.testing import inputs, sparse_bench
from flashmla_cupy.testing.bench_cases import PAGE_SIZE, BenchCase

_DEVIATION = 0.1  # of the normal values in q and the cache
_COLD_BYTES = 400e6  # together the caches of a small row are many times the L2


@dataclass
class BenchData:
    """caches: one (pages, 64, 1, 576) bf16 or (pages, 64, 1, 656) uint8 pool, or several with the same block table for
    a row that cycles.
    """

    q: Any  # (batch, s_q, h_q, 576)
    caches: list[Any]
    block_table: Any  # (batch, width) int32
    cache_seqlens: Any  # (batch,) int32
    scale: float


def cache_count(case: BenchCase, graph: bool) -> int:
    """How many caches a graph cycles through so that each call finds its own cold in L2."""
    if not graph:
        return 1
    cache_bytes = sum(case.lengths()) * case.token_bytes
    if cache_bytes > _COLD_BYTES:
        return 2
    return max(4, min(256, int(_COLD_BYTES // cache_bytes) + 1))


def build(case: BenchCase, graph: bool) -> BenchData:
    import cupy as cp

    lengths = case.lengths()
    counts = [-(-length // PAGE_SIZE) for length in lengths]
    pages = np.random.default_rng(0).permutation(sum(counts)).astype(np.int32)
    table, start = np.zeros((case.batch, max(counts)), np.int32), 0
    for row, count in enumerate(counts):
        table[row, :count] = pages[start : start + count]
        start += count
    shape = (sum(counts), PAGE_SIZE, case.h_kv, case.d_qk)
    caches = [
        sparse_bench.fp8_cache(cp, V32, sum(counts) * PAGE_SIZE, PAGE_SIZE, seed)
        if case.fp8
        else inputs.random_array(cp, "bfloat16", shape, seed, _DEVIATION)
        for seed in range(cache_count(case, graph))
    ]
    q = inputs.random_array(cp, "bfloat16", (case.batch, case.s_q, case.h_q, case.d_qk), 1000, _DEVIATION)
    return BenchData(q, caches, cp.asarray(table), cp.asarray(np.asarray(lengths, np.int32)), case.d_qk**-0.5)


def release() -> None:
    """Hands the memory of a row back to the device."""
    import cupy as cp

    cp.get_default_memory_pool().free_all_blocks()
