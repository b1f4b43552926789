"""Arrays and calls of a cache conversion benchmark row on the GPU: random tokens, and the FP8 cache of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import flashmla_cupy
from flashmla_cupy.testing import inputs
from flashmla_cupy.testing.bench_cases import KvQuantBenchCase

_DEVIATION = 0.1  # of the normal values


@dataclass
class KvQuantBenchData:
    """caches: what is read, one array in a list, as other benchmark data have several. out: what is written.

    One of them is (pages, page_size, 1, d_qk), the other (pages, page_size, 1, bytes_per_token) uint8.
    """

    caches: list[Any]
    out: Any


def build(case: KvQuantBenchCase, graph: bool) -> KvQuantBenchData:
    import cupy as cp

    shape = (case.tokens // case.page_size, case.page_size, 1, case.format.d_qk)
    kv = inputs.random_array(cp, case.dtype, shape, 0, _DEVIATION)
    cache = flashmla_cupy.quantize_kv_cache(kv, layout=case.layout)
    source, out = (kv, cache) if case.direction == "quantize" else (cache, kv)
    return KvQuantBenchData([source], out)


def ours(case: KvQuantBenchCase, data: KvQuantBenchData) -> Callable[[int], Any]:
    """call(i): the conversion with `out` given, returning it."""
    if case.direction == "quantize":
        return lambda i: flashmla_cupy.quantize_kv_cache(data.caches[i], layout=case.layout, out=data.out)
    return lambda i: flashmla_cupy.dequantize_kv_cache(
        data.caches[i], layout=case.layout, dtype=case.dtype, out=data.out
    )
