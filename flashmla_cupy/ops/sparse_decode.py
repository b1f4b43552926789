"""Decode over the tokens that indices name, and dense decode over an FP8 cache: check -> select -> run.

Arguments travel as a dict by the names of flash_mla_with_kvcache, None where the caller gave nothing.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from flashmla_cupy import backends
from flashmla_cupy.errors import UnsupportedError

from . import _checks
from ._checks import HEAD_DIM_V, DecodeProblem, SparseDecodeProblem
from .sched_meta import KV_BLOCK_TOKENS

_REQUIRED = ("q", "k_cache")
_INTEGERS = ("block_table", "cache_seqlens", "tile_scheduler_metadata", "num_splits", "indices", "topk_length",
             "extra_indices", "extra_topk_length")
_OUTPUTS = ("out", "lse", "workspace")
_SCALARS = ("head_dim_v", "causal", "is_fp8_kvcache", "softmax_scale")
_SPARSE = ("indices", "attn_sink", "topk_length", "extra_k_cache", "extra_indices", "extra_topk_length")
_DENSE = ("block_table", "cache_seqlens")


def serves(arguments: dict[str, Any]) -> bool:
    """Whether a call is one of this module: with indices, over an FP8 cache, or with an argument that goes with them.

    Raises TypeError for an is_fp8_kvcache that is no bool.
    """
    is_fp8 = _checks.check_bool("is_fp8_kvcache", arguments["is_fp8_kvcache"])
    return is_fp8 or any(arguments[name] is not None for name in _SPARSE)


def decode(arguments: dict[str, Any]) -> tuple[Any, Any]:
    """flash_mla_with_kvcache for the calls that this module serves."""
    return _on_host(*prepare(arguments))


def prepare(arguments: dict[str, Any]) -> tuple[DecodeProblem, dict[str, Any]]:
    """The problem that a call poses, and its arrays by name; raises for everything that can be wrong with it.

    The problem is a SparseDecodeProblem and `indices` among the arrays, or neither.

    Raises:
        TypeError, ValueError, UnsupportedError: as flash_mla_with_kvcache. Nothing was launched.
    """
    sparse = arguments["indices"] is not None
    for name in _SPARSE:
        if not sparse and arguments[name] is not None:
            raise TypeError(f"{name}: got {backends.describe(arguments[name])}, expected None without indices")
    scalars = {name: arguments[name] for name in _SCALARS}
    scalars["is_fp8_kvcache"] = _checks.check_bool("is_fp8_kvcache", scalars["is_fp8_kvcache"])
    arrays = {name: x for name, x in arguments.items() if name not in (*_SCALARS, *(_DENSE if sparse else _SPARSE))}
    if backends.backend_of("q", arguments["q"]) == "numpy":
        arrays = backends.host_arguments(arrays, _INTEGERS, _OUTPUTS, _REQUIRED)
        return _problem(arrays, scalars), arrays

    arrays = {name: _on_device(name, x) for name, x in arrays.items()}
    problem = _problem(arrays, scalars)
    _checks.check_same_device(arrays["q"].data.device_id, **arrays)
    _checks.check_element_alignment(**arrays)
    given = ["is_fp8_kvcache"] if problem.kv_format else []
    given += [name for name in _SPARSE if arguments[name] is not None]
    raise UnsupportedError(f"{', '.join(given)}: not supported by flash_mla_with_kvcache on a GPU yet",
                           ["indices and FP8 caches have no kernel in this version"],
                           "leave these arguments out, or pass NumPy arrays to run on the CPU")


def planned_tokens(problem: DecodeProblem) -> int | None:
    """`topk` of get_mla_metadata for a call: the KV blocks of both selections of a query, in tokens. None: dense."""
    if not isinstance(problem, SparseDecodeProblem):
        return None
    return -(-problem.topk // KV_BLOCK_TOKENS) * KV_BLOCK_TOKENS + problem.extra_topk


def _problem(arrays: dict[str, Any], scalars: dict[str, Any]) -> DecodeProblem:
    looked_at = {name: x for name, x in arrays.items() if name not in ("tile_scheduler_metadata", "workspace")}
    check = _checks.check_sparse_decode if "indices" in arrays else _checks.check_decode
    return check(**looked_at, metadata=arrays["tile_scheduler_metadata"], **scalars)


def _on_device(name: str, x: Any) -> Any:
    if x is None and name not in _REQUIRED:
        return None
    return (backends.as_integers if name in _INTEGERS else backends.as_device)(name, x)


# ---- NumPy backend ----
def _on_host(problem: DecodeProblem, arrays: dict[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    from flashmla_cupy.reference import sparse_decode as reference

    q, k_cache, out, lse = (arrays[name] for name in ("q", "k_cache", "out", "lse"))
    out = np.empty(problem.out_shape, q.dtype) if out is None else out
    lse = np.empty(problem.lse_shape, np.float32) if lse is None else lse
    if problem.nothing_to_attend or 0 in q.shape:
        out[...], lse[...] = 0, -np.inf
        return out, lse
    if isinstance(problem, SparseDecodeProblem):
        exact_out, exact_lse = reference.attend(
            q, k_cache, arrays["indices"], HEAD_DIM_V, softmax_scale=problem.softmax_scale,
            **{name: arrays[name] for name in _SPARSE if name != "indices"})
    else:
        exact_out, exact_lse = reference.attend_paged(
            q, k_cache, arrays["block_table"], arrays["cache_seqlens"], HEAD_DIM_V,
            softmax_scale=problem.softmax_scale, causal=problem.causal)
    out[...], lse[...] = exact_out.astype(q.dtype), exact_lse
    return out, lse
