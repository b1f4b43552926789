"""Run as a module under compute-sanitizer: each kernel a few times on exactly sized allocations, nothing else.

CuPy's memory pool is off, so that the tool sees the real end of each array.
"""

from __future__ import annotations

import sys

from flashmla_cupy.testing.cases import CONTIGUOUS, Case
from flashmla_cupy.testing.fp8_dense_cases import Fp8DenseCase
from flashmla_cupy.testing.prefill_cases import PrefillCase
from flashmla_cupy.testing.sparse_cases import SparseCase

CASES = (
    Case((65, 0, 130), h_q=16),
    Case((300,), h_q=128),
    Case((63, 64, 65), s_q=3, h_q=16, causal=True),
    Case((20, 7), h_q=3, page_size=16, dtype="float16"),
    Case((100, 70), h_q=64, page_size=CONTIGUOUS),
    Case((140,), h_q=8, q_layout="head_view", out_layout="padded", cache_layout="interleaved", d_qk=512),
    Case((4096,), h_q=16, with_metadata=False),
    Case((0, 0), h_q=16),
)
SPARSE_CASES = (
    SparseCase(100, batch=3, h_q=16, invalid="random"),
    SparseCase(133, batch=2, h_q=128, layout="d512", sink="mixed"),
    SparseCase(64, s_q=2, h_q=192, extra_topk=70, extra_page_size=48, length="random", cache_layout="interleaved"),
)
PREFILL_CASES = (
    PrefillCase(3, 100, h_q=16, invalid="random", requests="some"),
    PrefillCase(70, 70, h_q=130, length="random", sink="mixed", kv_layout="interleaved"),
    PrefillCase(3, 200, h_q=16, s_kv=60000, length="random"),
    PrefillCase(2, 200, h_q=8, s_kv=5, d_qk=512, out_layout="padded"),
)
FP8_DENSE_CASES = (
    Fp8DenseCase((65, 0, 130), h_q=16),
    Fp8DenseCase((200, 1), s_q=2, h_q=64, layout="d512", page_size=48, causal=True),
    Fp8DenseCase((100, 70), h_q=128, page_size=CONTIGUOUS),
    Fp8DenseCase((90, 200), s_q=2, h_q=32, causal=True),
)


def main() -> None:
    import cupy as cp
    import numpy as np

    import flashmla_cupy
    from flashmla_cupy.ops._select import experimental_kernels
    from flashmla_cupy.ops.sparse_decode import with_codes
    from flashmla_cupy.testing import (
        checks,
        fp8_dense_inputs,
        inputs,
        prefill_checks,
        prefill_inputs,
        sparse_checks,
        sparse_inputs,
        trace,
    )

    cp.cuda.set_allocator(None)
    with experimental_kernels(), trace.launches() as names:
        for case in CASES:
            checks.call(case, inputs.build(case, cp))
            cp.cuda.Device().synchronize()
        for codes in (False, True):
            with with_codes(codes):
                for case in SPARSE_CASES:
                    sparse_checks.call(case, sparse_inputs.build(case, cp), cp)
                    cp.cuda.Device().synchronize()
                for case in FP8_DENSE_CASES:
                    sparse_checks.call_dense(case, fp8_dense_inputs.build(case, cp), cp)
                    cp.cuda.Device().synchronize()
        for case in PREFILL_CASES:
            prefill_checks.call(case, prefill_inputs.build(case, cp))
            cp.cuda.Device().synchronize()
        for layout, d_qk in (("v32", 576), ("d512", 512)):
            tokens = inputs.random_array(cp, "bfloat16", (3, 48, 1, d_qk), seed=1)
            flashmla_cupy.dequantize_kv_cache(flashmla_cupy.quantize_kv_cache(tokens, layout=layout), layout=layout)
        flashmla_cupy.token_indices(cp.zeros((2, 3), np.int32), cp.zeros((2, 1, 5), np.int32), 48)
        outs = cp.asarray(np.ones((33, 1, 2, 4, 512), np.float32))
        flashmla_cupy.merge_states(outs, cp.asarray(np.zeros((33, 1, 4, 2), np.float32)))
        cp.cuda.Device().synchronize()
    print(f"kernels ran: {' '.join(dict.fromkeys(names))}", file=sys.stderr)


if __name__ == "__main__":
    main()
