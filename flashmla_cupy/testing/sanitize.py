"""Run as a module under compute-sanitizer: each kernel a few times on exactly sized allocations, nothing else.

CuPy's memory pool is off, so that the tool sees the real end of each array.
"""

from __future__ import annotations

import sys

from flashmla_cupy.testing.cases import CONTIGUOUS, Case

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


def main() -> None:
    import cupy as cp
    import numpy as np

    import flashmla_cupy
    from flashmla_cupy.ops._select import experimental_kernels
    from flashmla_cupy.testing import checks, inputs, trace

    cp.cuda.set_allocator(None)
    with experimental_kernels(), trace.launches() as names:
        for case in CASES:
            checks.call(case, inputs.build(case, cp))
            cp.cuda.Device().synchronize()
        outs = cp.asarray(np.ones((33, 1, 2, 4, 512), np.float32))
        flashmla_cupy.merge_states(outs, cp.asarray(np.zeros((33, 1, 4, 2), np.float32)))
        cp.cuda.Device().synchronize()
    print(f"kernels ran: {' '.join(dict.fromkeys(names))}", file=sys.stderr)


if __name__ == "__main__":
    main()
