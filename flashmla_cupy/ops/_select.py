"""Kernel selection: a pure function of the problem and the device, that refuses with reasons and a way out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace

from flashmla_cupy import kv_format
from flashmla_cupy.errors import UnsupportedError
from flashmla_cupy.ops._checks import HEAD_DIM_V, HEAD_DIMS_QK
from flashmla_cupy.ops._plans import while_set
from flashmla_cupy.runtime.device import DeviceInfo
from flashmla_cupy.runtime.spec import KernelSpec

_CPP_TYPES = {"bfloat16": ("bf16_t", "bf16"), "float16": ("fp16_t", "fp16"), "float32": ("float", "fp32")}
_NUMPY_WAY_OUT = "pass NumPy arrays to run on the CPU"


@dataclass(frozen=True)
class Problem:
    """What decides which kernel runs. dtype: of q (dense_decode), out (combine) or what is not FP8 (kv_quant)."""

    op: str  # "dense_decode" | "combine" | "sched_meta" | "kv_quant.quantize" | ...
    dtype: str = ""
    d_qk: int = 0
    d_v: int = 0


def select(problem: Problem, device: DeviceInfo) -> KernelSpec:
    """The kernel for `problem` on `device`, compiled for that device's architecture.

    Raises UnsupportedError that lists every reason, not just the first.
    """
    try:
        reasons, *candidates = _CHOICES[problem.op]
    except KeyError:
        raise ValueError(f"op: got {problem.op!r}, expected one of {', '.join(_CHOICES)}") from None
    why_not = reasons(problem, device)
    if not why_not:
        for table in candidates:
            spec = table[problem.dtype, problem.d_qk]
            if selectable(spec):
                return replace(spec, arch=device.arch)
        why_not = [f"{spec.name}: experimental, no record of a passing validation on a GPU vouches for its source"]
    raise UnsupportedError(f"{problem.op}: no kernel for this call on {device.name}", why_not, _NUMPY_WAY_OUT)


_experimental_allowed = False


def experimental_allowed() -> bool:
    return _experimental_allowed


def selectable(spec: KernelSpec) -> bool:
    """Whether `select` may hand out `spec` now."""
    return _experimental_allowed or not spec.experimental


def experimental_kernels() -> AbstractContextManager[None]:
    """Within, `select` also hands out experimental kernels, and prefers them: for what validates and measures them."""
    return while_set(globals(), "_experimental_allowed", True)


def all_specs() -> tuple[KernelSpec, ...]:
    """Every kernel variant, in a fixed order.

    Only what costs time as a run-time argument is compiled in, such as the element type and the head dimension of q
    and k; `kernels list` says what for each op (flashmla_cupy/testing/kernels.py).
    Experimental ones have no passing GPU record (tests/records) for their present source.
    """
    return (*_DENSE_DECODE.values(),
            *_COMBINE.values(), *_COMBINE_HALF.values(), *_COMBINE_PAIRS.values(), *_COMBINE_QUARTERS.values(),
            *_SCHED_META.values(),
            *_QUANTIZE.values(), *_DEQUANTIZE.values(), *_TOKEN_INDICES.values(), *_SPARSE_DECODE.values(),
            *_CROSSOVER_DECODE.values(), *_PAGED_FP8_DECODE.values(), *_PAGED_CROSSOVER_DECODE.values(),
            *_CODES_DECODE.values(), *_PAGED_CODES_DECODE.values(),
            *_FEW_ROWS_DECODE.values(), *_PAGED_FEW_ROWS_DECODE.values(),
            *_SPARSE_PREFILL.values())


_DENSE_DECODE = {
    (dtype, d_qk): KernelSpec("dense_decode", "sm90", (_CPP_TYPES[dtype][0], str(d_qk), partial),
                              (_CPP_TYPES[dtype][1], f"d{d_qk}"), "DenseDecodeParams")
    for dtype, partial in (("bfloat16", "fp16_t"), ("float16", "float")) for d_qk in sorted(HEAD_DIMS_QK, reverse=True)
}
_COMBINE = {
    (dtype, 0): KernelSpec("combine", "sm80", (_CPP_TYPES[dtype][0],), (_CPP_TYPES[dtype][1],), "CombineParams")
    for dtype in ("bfloat16", "float16", "float32")
}
_COMBINE_HALF, _COMBINE_PAIRS, _COMBINE_QUARTERS = (  # partial results in fp16
    {("bfloat16", 0): KernelSpec("combine", "sm80", ("bf16_t", "fp16_t", *warp), ("bf16", "half", *tag),
                                 "CombineParams")}
    for tag, *warp in (((),), (("pairs",), "2", "1"), (("quarters",), "1", "2")))
_SCHED_META = {("", 0): KernelSpec("sched_meta", "sm80", (), (), "SchedMetaParams")}
_QUANTIZE, _DEQUANTIZE = (
    {(dtype, layout.d_qk): KernelSpec("kv_quant", path, (f"kv_format::{layout.name.upper()}", _CPP_TYPES[dtype][0]),
                                      (layout.name, _CPP_TYPES[dtype][1]), "KvQuantParams")
     for layout in kv_format.FORMATS.values() for dtype in ("bfloat16", "float32")}
    for path in ("quantize_sm89", "dequantize_sm89"))
_TOKEN_INDICES = {("", 0): KernelSpec("kv_quant", "token_indices_sm80", ("int32_t",), (), "TokenIndicesParams")}
_SPARSE_DECODE, _CROSSOVER_DECODE, _PAGED_FP8_DECODE, _PAGED_CROSSOVER_DECODE = (
    {("bfloat16", layout.d_qk): KernelSpec("sparse_decode", "sm90", (f"kv_format::{layout.name.upper()}", *flags),
                                           (layout.name, tag), "SparseDecodeParams", experimental="crossover" in tag)
     for layout in kv_format.FORMATS.values()}
    for tag, *flags in (("indices", "false", "false"), ("crossover", "false", "true"),
                        ("paged", "true", "false"), ("paged_crossover", "true", "true")))
_CODES_DECODE, _PAGED_CODES_DECODE = (
    {("bfloat16", kv_format.V32.d_qk): KernelSpec("sparse_decode", "e4m3_sm90",
                                                  ("sparse_decode::E4m3<kv_format::V32>", paged, "false"),
                                                  (kv_format.V32.name, tag), "SparseDecodeParams")}
    for tag, paged in (("indices", "false"), ("paged", "true")))
_FEW_ROWS_DECODE, _PAGED_FEW_ROWS_DECODE = (
    {("bfloat16", kv_format.V32.d_qk): KernelSpec("sparse_decode", "few_rows_sm90",
                                                  ("sparse_decode::FewRows<kv_format::V32>", paged, "false"),
                                                  (kv_format.V32.name, tag), "SparseDecodeParams")}
    for tag, paged in (("few_indices", "false"), ("few_paged", "true")))
_SPARSE_PREFILL = {
    ("bfloat16", d_qk): KernelSpec("sparse_prefill", "sm90", (str(d_qk),), ("bf16", f"d{d_qk}"), "SparsePrefillParams")
    for d_qk in sorted(HEAD_DIMS_QK, reverse=True)
}


def _capability_reasons(device: DeviceInfo, lowest: tuple[int, int], only_major: bool) -> list[str]:
    got = device.compute_capability
    if got[0] == lowest[0] if only_major else got >= lowest:
        return []
    wanted = f"{lowest[0]}.x (wgmma)" if only_major else f"{lowest[0]}.{lowest[1]} or higher"
    return [f"compute capability: got {got[0]}.{got[1]}, expected {wanted}"]


def _dense_decode_reasons(problem: Problem, device: DeviceInfo) -> list[str]:
    reasons = _capability_reasons(device, (9, 0), only_major=True)
    dtypes = sorted({dtype for dtype, _ in _DENSE_DECODE})
    if problem.dtype not in dtypes:
        reasons.append(f"dtype: got {problem.dtype}, expected {' or '.join(dtypes)}")
    if problem.d_qk not in HEAD_DIMS_QK:
        reasons.append(f"d_qk: got {problem.d_qk}, expected {' or '.join(map(str, HEAD_DIMS_QK))}")
    if problem.d_v != HEAD_DIM_V:
        reasons.append(f"d_v: got {problem.d_v}, expected {HEAD_DIM_V}")
    return reasons


def _combine_reasons(problem: Problem, device: DeviceInfo) -> list[str]:
    reasons = _capability_reasons(device, (8, 0), only_major=False)
    if (problem.dtype, 0) not in _COMBINE:
        reasons.append(f"dtype: got {problem.dtype}, expected {' or '.join(dtype for dtype, _ in _COMBINE)}")
    if problem.d_v % 4 or problem.d_v < 4:
        reasons.append(f"d_v: got {problem.d_v}, expected a multiple of 4")
    return reasons


def _sched_meta_reasons(problem: Problem, device: DeviceInfo) -> list[str]:
    return _capability_reasons(device, (8, 0), only_major=False)


def _kv_quant_reasons(problem: Problem, device: DeviceInfo) -> list[str]:
    reasons = _capability_reasons(device, (8, 9), only_major=False)  # e4m3 conversions
    if (problem.dtype, problem.d_qk) not in _QUANTIZE:
        known = " or ".join(f"{dtype} with {d_qk}" for dtype, d_qk in _QUANTIZE)
        reasons.append(f"dtype, d_qk: got {problem.dtype} with {problem.d_qk}, expected {known}")
    return reasons


def _on_hopper(table: dict[tuple[str, int], KernelSpec]) -> Callable[[Problem, DeviceInfo], list[str]]:
    def reasons(problem: Problem, device: DeviceInfo) -> list[str]:
        found = _capability_reasons(device, (9, 0), only_major=True)
        if (problem.dtype, problem.d_qk) not in table:
            known = " or ".join(f"{dtype} with {d_qk}" for dtype, d_qk in table)
            found.append(f"dtype, d_qk: got {problem.dtype} with {problem.d_qk}, expected {known}")
        return found

    return reasons


def serves_few_rows(dtype: str, d_qk: int) -> bool:
    """Whether `select` may hand out an FP8 decode kernel for few query rows now."""
    spec = _FEW_ROWS_DECODE.get((dtype, d_qk))
    return spec is not None and selectable(spec)


def serves_codes(dtype: str, d_qk: int) -> bool:
    """Whether `select` may hand out an FP8 decode kernel that multiplies codes now."""
    spec = _CODES_DECODE.get((dtype, d_qk))
    return spec is not None and selectable(spec)


_CHOICES = {  # op -> why a device cannot run it, and the tables of its kernels, the preferred one first
    "dense_decode": (_dense_decode_reasons, _DENSE_DECODE),
    "combine": (_combine_reasons, _COMBINE),
    "combine.half.plain": (_combine_reasons, _COMBINE_HALF),
    "combine.half.pairs": (_combine_reasons, _COMBINE_PAIRS),
    "combine.half.quarters": (_combine_reasons, _COMBINE_QUARTERS),
    "sched_meta": (_sched_meta_reasons, _SCHED_META),
    "kv_quant.quantize": (_kv_quant_reasons, _QUANTIZE),
    "kv_quant.dequantize": (_kv_quant_reasons, _DEQUANTIZE),
    "kv_quant.token_indices": (_sched_meta_reasons, _TOKEN_INDICES),
    "sparse_decode.indices": (_on_hopper(_SPARSE_DECODE), _SPARSE_DECODE),
    "sparse_decode.crossover": (_on_hopper(_CROSSOVER_DECODE), _CROSSOVER_DECODE),
    "sparse_decode.paged": (_on_hopper(_PAGED_FP8_DECODE), _PAGED_FP8_DECODE),
    "sparse_decode.paged_crossover": (_on_hopper(_PAGED_CROSSOVER_DECODE), _PAGED_CROSSOVER_DECODE),
    "sparse_decode.codes": (_on_hopper(_CODES_DECODE), _CODES_DECODE),
    "sparse_decode.paged_codes": (_on_hopper(_PAGED_CODES_DECODE), _PAGED_CODES_DECODE),
    "sparse_decode.few_indices": (_on_hopper(_FEW_ROWS_DECODE), _FEW_ROWS_DECODE),
    "sparse_decode.few_paged": (_on_hopper(_PAGED_FEW_ROWS_DECODE), _PAGED_FEW_ROWS_DECODE),
    "sparse_prefill": (_on_hopper(_SPARSE_PREFILL), _SPARSE_PREFILL),
}
