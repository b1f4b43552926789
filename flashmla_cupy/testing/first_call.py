"""Run as a module in a fresh process: times the first call and prints a line of JSON (for bench.first_calls)."""

from __future__ import annotations

import contextlib
import json
import sys
import time

EXPERIMENTAL = "--experimental"


def main(op: str = "dense_decode", flag: str = "") -> None:
    """flag: EXPERIMENTAL or nothing."""
    import cupy as cp
    import ml_dtypes

    started = time.perf_counter()
    q = cp.zeros((1, 1, 128, 576), cp.uint16).view(ml_dtypes.bfloat16)
    cache = cp.zeros((64, 64, 1, 576), cp.uint16).view(ml_dtypes.bfloat16)
    fp8_cache, indices = cp.zeros((64, 64, 1, 656), cp.uint8), cp.arange(2048, dtype=cp.int32)[None, None]
    table, lengths = cp.arange(64, dtype=cp.int32)[None], cp.asarray([4096], cp.int32)
    cp.cuda.Device().synchronize()
    context_seconds = time.perf_counter() - started

    from flashmla_cupy import flash_mla_sparse_fwd, flash_mla_with_kvcache, quantize_kv_cache
    from flashmla_cupy.ops._select import all_specs, experimental_kernels
    from flashmla_cupy.testing import trace

    allowed = experimental_kernels() if flag == EXPERIMENTAL else contextlib.nullcontext()
    with allowed, trace.launches() as names:
        started = time.perf_counter()
        if op == "sparse_decode":
            flash_mla_with_kvcache(q, fp8_cache, None, None, 512, is_fp8_kvcache=True, indices=indices)
        elif op == "sparse_prefill":
            flash_mla_sparse_fwd(q[0], cache.reshape(-1, 1, 576), indices, 576**-0.5)
        elif op == "kv_quant":
            quantize_kv_cache(cache)
        else:
            flash_mla_with_kvcache(q, cache, table, lengths, 512)
        cp.cuda.Device().synchronize()
    call_seconds = time.perf_counter() - started

    from flashmla_cupy.runtime.compile import compile_cubin

    compiles = {spec.name: compile_cubin(spec).seconds for spec in all_specs() if spec.name in names}
    print(json.dumps({"context_seconds": context_seconds, "call_seconds": call_seconds, "compile_seconds": compiles}))


if __name__ == "__main__":
    main(*sys.argv[1:])
