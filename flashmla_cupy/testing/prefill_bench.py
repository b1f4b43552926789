"""Arrays and calls of a sparse prefill benchmark row on the GPU: random bf16 keys, random rows for each query token."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import flashmla_cupy
from flashmla_cupy.testing import inputs
from flashmla_cupy.testing.bench_cases import PrefillBenchCase

_DEVIATION = 0.1  # of the normal values in q and kv


@dataclass
class PrefillBenchData:
    """caches: one kv array in a list, as other benchmark data have several."""

    q: Any  # (s_q, h_q, d_qk)
    caches: list[Any]  # (s_kv, 1, d_qk)
    indices: Any  # (s_q, 1, topk) int32
    scale: float


def build(case: PrefillBenchCase, graph: bool) -> PrefillBenchData:
    import cupy as cp

    rng = np.random.default_rng(0)
    indices = rng.integers(0, case.s_kv, (case.s_q, 1, case.topk), dtype=np.int32)
    q = inputs.random_array(cp, "bfloat16", (case.s_q, case.h_q, case.d_qk), 1000, _DEVIATION)
    kv = inputs.random_array(cp, "bfloat16", (case.s_kv, 1, case.d_qk), 0, _DEVIATION)
    return PrefillBenchData(q, [kv], cp.asarray(indices), case.d_qk**-0.5)


def ours(case: PrefillBenchCase, data: PrefillBenchData) -> Callable[[int], Any]:
    """call(i): the prefill with outputs given, returning `out`."""
    import cupy as cp

    out = cp.empty((case.s_q, case.h_q, case.d_v), data.q.dtype)
    max_logits, lse = (cp.empty((case.s_q, case.h_q), np.float32) for _ in range(2))

    def call(i: int) -> Any:
        flashmla_cupy.flash_mla_sparse_fwd(
            data.q, data.caches[i], data.indices, data.scale, case.d_v, out=out, max_logits=max_logits, lse=lse
        )
        return out

    return call
