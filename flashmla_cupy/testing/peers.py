"""Other libraries' kernels, measured beside ours on the same arrays: FlashMLA and FlashAttention-3 as torch extensions.

torch is imported here alone and only when a peer library is given. CuPy and torch both work on the legacy default
stream, so their calls keep their order. Arrays cross over DLPack without a copy.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flashmla_cupy.errors import FlashMLAError
from flashmla_cupy.testing.bench_cases import AnyCase, BenchCase, PrefillBenchCase, SparseBenchCase
from flashmla_cupy.testing.bench_data import BenchData
from flashmla_cupy.testing.prefill_bench import PrefillBenchData
from flashmla_cupy.testing.sparse_bench import SparseBenchData


@dataclass(frozen=True)
class Peer:
    """prepare(case, data) -> call(i): one call on cache i, returning a torch output of the shape of ours."""

    name: str
    prepare: Callable[[Any, Any], Callable[[int], Any]]


def load(paths: list[str], op: str = "dense_decode") -> list[Peer]:
    """The kernels for `op` that the given shared libraries register.

    Raises FlashMLAError for a library that is missing or has none, and where no library is known to have any.
    """
    if not paths:
        return []
    known = _KNOWN[op]
    if not known:
        raise FlashMLAError(f"peer-lib: got a library, expected none with {op}: no peer has kernels for it")
    try:
        import torch
    except ImportError:
        raise FlashMLAError("peer-lib: torch is not installed here") from None
    peers = []
    for path in paths:
        if not Path(path).is_file():
            raise FlashMLAError(f"peer-lib: no file {path}")
        before = {name for name in known if _registered(torch, name)}
        try:
            torch.ops.load_library(str(Path(path).resolve()))
        except OSError as error:
            raise FlashMLAError(f"peer-lib: {path}: {str(error).splitlines()[0]}") from None
        added = [name for name in known if name not in before and _registered(torch, name)]
        if not added:
            raise FlashMLAError(f"peer-lib: {path} registers none of {', '.join(known)} (or was given twice)")
        peers += [known[name] for name in added]
    return peers


def serving(case: AnyCase, peers: list[Peer]) -> list[Peer]:
    """Those of an op's peers that have a kernel for `case`.

    None have one for dense decode over an FP8 cache; FlashMLA's sparse prefill takes multiples of 64 heads.
    """
    if isinstance(case, PrefillBenchCase):
        return peers if case.h_q % 64 == 0 else []
    return [] if isinstance(case, BenchCase) and case.fp8 else peers


def _registered(torch: Any, qualified: str) -> bool:
    namespace, operator = qualified.split(".")
    return hasattr(getattr(torch.ops, namespace), operator)


def as_torch(array: Any) -> Any:
    """A torch tensor over a CuPy array's memory."""
    import ml_dtypes
    import numpy as np
    import torch

    if array.dtype == ml_dtypes.bfloat16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def _flash_mla(case: BenchCase, data: BenchData) -> Callable[[int], Any]:
    import torch

    decode = torch.ops._flashmla_C.dense_decode_fwd
    q, table, lengths = as_torch(data.q), as_torch(data.block_table), as_torch(data.cache_seqlens)
    caches = [as_torch(cache) for cache in data.caches]
    plan: list[Any] = [None, None]  # made by the first call, then reused

    def call(i: int) -> Any:
        out, _, *plan[:] = decode(q, caches[i], case.d_v, lengths, table, data.scale, case.causal, *plan, None)
        return out

    return call


def _flash_attention_3(case: BenchCase, data: BenchData) -> Callable[[int], Any]:
    import torch

    forward, d_v = torch.ops._vllm_fa3_C.fwd, case.d_v
    q = as_torch(data.q)
    q_nope, q_rope = q[..., :d_v].contiguous().flatten(0, 1), q[..., d_v:].contiguous().flatten(0, 1)
    caches = [as_torch(cache) for cache in data.caches]
    table, lengths = as_torch(data.block_table), as_torch(data.cache_seqlens)
    cu_q = torch.arange(0, (case.batch + 1) * case.s_q, case.s_q, dtype=torch.int32, device=q.device)
    causal = case.causal or case.s_q == 1

    def call(i: int) -> Any:
        out = forward(
            q_rope,
            caches[i][..., d_v:],
            caches[i][..., :d_v],
            None,
            None,
            q_nope,
            None,
            cu_q,
            None,
            None,
            None,
            lengths,
            case.s_q,
            None,
            table,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            None,
            data.scale,
            causal,
            -1,
            -1,
            0.0,
            True,
            None,
            0,
            None,
            0,
            None,
            1,
            0,
            None,
        )
        out = out[0] if isinstance(out, (tuple, list)) else out
        return out.view(case.batch, case.s_q, case.h_q, d_v)

    return call


def _flash_mla_sparse(case: SparseBenchCase, data: SparseBenchData) -> Callable[[int], Any]:
    import torch

    def fp8(cache: Any) -> Any:
        return None if cache is None else as_torch(cache).view(torch.float8_e4m3fn)

    decode = torch.ops._flashmla_C.sparse_decode_fwd
    q, indices, caches = as_torch(data.q), as_torch(data.indices), [*map(fp8, data.caches)]
    extra_cache = fp8(data.extra_cache)
    extra_indices = None if data.extra_indices is None else as_torch(data.extra_indices)
    plan: list[Any] = [None, None]  # made by the first call, then reused

    def call(i: int) -> Any:
        out, _, *plan[:] = decode(
            q, caches[i], indices, None, None, *plan, extra_cache, extra_indices, None, case.d_v, data.scale, None
        )
        return out

    return call


def _flash_mla_prefill(case: PrefillBenchCase, data: PrefillBenchData) -> Callable[[int], Any]:
    import torch

    prefill = torch.ops._flashmla_C.sparse_prefill_fwd
    q, indices, caches = as_torch(data.q), as_torch(data.indices), [*map(as_torch, data.caches)]
    return lambda i: prefill(q, caches[i], indices, data.scale, case.d_v, None, None, None)[0]


_KNOWN = {
    "dense_decode": {
        "_flashmla_C.dense_decode_fwd": Peer("FlashMLA", _flash_mla),
        "_vllm_fa3_C.fwd": Peer("FA3", _flash_attention_3),
    },
    "sparse_decode": {"_flashmla_C.sparse_decode_fwd": Peer("FlashMLA", _flash_mla_sparse)},
    "sparse_prefill": {"_flashmla_C.sparse_prefill_fwd": Peer("FlashMLA", _flash_mla_prefill)},
    "kv_quant": {},
}
