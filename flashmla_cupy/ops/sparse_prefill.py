"""Token-level sparse attention of a prefill over bf16 keys: check -> select -> plan -> launch.

Arguments travel as a dict by the names of flash_mla_sparse_fwd, None where the caller gave nothing. As in decode, a
call whose arrays can be used as they are is planned once and then only fills in pointers; other arrays are staged
first.
"""

from __future__ import annotations

import math
from typing import Any

import cupy
import numpy as np

from flashmla_cupy import backends
from flashmla_cupy.runtime import params as kernel_params

from . import _checks, _device, _overlap, _plans
from ._checks import HEAD_DIM_V
from ._prefill_checks import SparsePrefillProblem, check_sparse_prefill
from ._select import Problem

_REQUIRED = ("q", "kv", "indices")
_INTEGERS = ("indices", "topk_length", "cu_seqlens_q", "cu_seqlens_kv")
_OUTPUTS = ("out", "max_logits", "lse")
_SCALARS = ("sm_scale", "d_v")
_POINTERS = ("q", "kv", "indices", "topk_length", "attn_sink", "cu_seqlens_q", "cu_seqlens_kv")  # as in the params


def flash_mla_sparse_fwd(
    q: Any, kv: Any, indices: Any, sm_scale: float | None, d_v: int = 512, attn_sink: Any = None,
    topk_length: Any = None, *, cu_seqlens_q: Any = None, cu_seqlens_kv: Any = None, out: Any = None,
    max_logits: Any = None, lse: Any = None,
) -> tuple[Any, Any, Any]:
    """Attention of every query token over the rows of kv that its indices name: out = softmax(sm_scale Q K^T) V.

    V is the first 512 dims of K. CuPy arrays run on q's device and CuPy's current stream there; nothing waits for the
    GPU, and the call can be captured into a CUDA graph after one call outside. Arrays of other libraries on a GPU are
    used in place (DLPack or __cuda_array_interface__) and the results are CuPy arrays. NumPy arrays run on the CPU and
    give NumPy arrays.

    Args:
        q: (s_q, h_q, d_qk) bfloat16 (ml_dtypes; NumPy: also float16), d_qk 576 or 512, any h_q. Any strides.
        kv: (s_kv, 1, d_qk) of q's type. Any strides (q and kv are copied if their rows are not aligned to 16 bytes).
        indices: (s_q, 1, topk) or (s_q, topk) integers, rows of kv in any order. Below 0 or not below s_kv: skipped,
            and nothing is read for them. A row that is named twice counts as two keys.
        sm_scale: what scores are multiplied with, positive and finite; None is d_qk ** -0.5.
        d_v: 512.
        attn_sink: (h_q,) float32, a logit (natural log, not scaled) that takes part in the softmax of out without a
            value: out is divided by 1 + exp(sink - lse). -inf has no effect, +inf gives zeros. max_logits and lse stay
            without it.
        topk_length: (s_q,) integers: how many of the first indices of a token count; negative is 0.
        cu_seqlens_q, cu_seqlens_kv: (requests + 1,) integers, both or none: tokens cu_seqlens_q[r] up to
            cu_seqlens_q[r + 1] belong to request r, whose keys are the rows cu_seqlens_kv[r] up to cu_seqlens_kv[r +
            1]. Its indices count from the first of these; those that are not below its number of keys are skipped. A
            token of no request attends to nothing. On the host, offsets that decrease or lie outside are a ValueError;
            on a GPU nothing looks at the values beforehand, and whatever they are, no memory outside kv is read.
        out, max_logits, lse: arrays to write the results into, of any strides (out: last axis contiguous). Memory that
            they share with another argument is a ValueError.

    Returns:
        out (s_q, h_q, 512) of q's type; max_logits (s_q, h_q) float32, the largest scaled score; lse (s_q, h_q)
        float32, the natural log-sum-exp of the scaled scores. A token that attends to nothing gives zeros, -inf and
        -inf.

    Raises:
        TypeError, ValueError: "argument: got ..., expected ...", before anything is launched. UnsupportedError: no
        kernel for the device or the arguments. CaptureError: the first call of its kind inside a graph capture.
    """
    arguments = dict(q=q, kv=kv, indices=indices, sm_scale=sm_scale, d_v=d_v, attn_sink=attn_sink,
                     topk_length=topk_length, cu_seqlens_q=cu_seqlens_q, cu_seqlens_kv=cu_seqlens_kv, out=out,
                     max_logits=max_logits, lse=lse)
    key = _plans.key_of("sparse_prefill", arguments)
    plan = _plans.PLANS.get(key)
    if plan is not None:
        device_id = q.data.device_id
        if device_id == _device.current_device():
            return plan.run(arguments)
        with _device.on_device(device_id):
            return plan.run(arguments)
    problem, arrays = _prepare(arguments)
    if isinstance(arrays["q"], np.ndarray):
        return _on_host(problem, arrays)
    with _device.on_device(arrays["q"].data.device_id):
        return _on_gpu(problem, arrays, key, arguments)


def _prepare(arguments: dict[str, Any]) -> tuple[SparsePrefillProblem, dict[str, Any]]:
    """The problem that a call poses, and its arrays by name; raises for everything that can be wrong with it."""
    scalars = {name: arguments[name] for name in _SCALARS}
    arrays = {name: x for name, x in arguments.items() if name not in _SCALARS}
    if backends.backend_of("q", arguments["q"]) == "numpy":
        arrays = backends.host_arguments(arrays, _INTEGERS, _OUTPUTS, _REQUIRED)
        problem = check_sparse_prefill(**arrays, **scalars)
        _check_offsets("cu_seqlens_q", arrays["cu_seqlens_q"], problem.s_q)
        _check_offsets("cu_seqlens_kv", arrays["cu_seqlens_kv"], problem.s_kv)
        _overlap.check(arrays, {name: arguments[name] for name in arrays})
        return problem, arrays
    arrays = {name: _on_device(name, x) for name, x in arrays.items()}
    problem = check_sparse_prefill(**arrays, **scalars)
    _checks.check_same_device(arrays["q"].data.device_id, **arrays)
    _checks.check_element_alignment(**arrays)
    _overlap.check(arrays)
    return problem, arrays


def _check_offsets(name: str, offsets: np.ndarray | None, rows: int) -> None:
    if offsets is None or offsets.size == 0:
        return
    if offsets[0] < 0 or offsets[-1] > rows or (offsets[1:] < offsets[:-1]).any():
        raise ValueError(f"{name}: got {np.array2string(offsets, threshold=8)}, expected offsets that do not decrease, "
                         f"from 0 on, up to {rows}")


def _on_device(name: str, x: Any) -> Any:
    if x is None and name not in _REQUIRED:
        return None
    return (backends.as_integers if name in _INTEGERS else backends.as_device)(name, x)


# ---- NumPy backend ----
def _on_host(p: SparsePrefillProblem, arrays: dict[str, Any]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    from flashmla_cupy.reference import sparse_prefill as reference
    from flashmla_cupy.reference._numerics import cast

    q, out, max_logits, lse = (arrays[name] for name in ("q", *_OUTPUTS))
    out = np.empty(p.out_shape, q.dtype) if out is None else out
    max_logits, lse = (np.empty(p.row_shape, np.float32) if x is None else x for x in (max_logits, lse))
    if p.nothing_to_attend:
        out[...], max_logits[...], lse[...] = 0, -np.inf, -np.inf
        return out, max_logits, lse
    results = reference.attend(sm_scale=p.sm_scale, d_v=HEAD_DIM_V,
                               **{name: x for name, x in arrays.items() if name not in _OUTPUTS})
    for target, exact in zip((out, max_logits, lse), results, strict=True):
        target[...] = cast(exact, target.dtype)
    return out, max_logits, lse


# ---- staging: what the kernel cannot read as it is ----
def _on_gpu(p: SparsePrefillProblem, arrays: dict[str, Any], key: tuple, arguments: dict[str, Any]) -> tuple:
    """Plans, stages and launches, on q's device, the current. key, arguments: of the call as it came."""
    stream_ptr = _device.current_stream_ptr()
    with _device.temporaries(stream_ptr):
        staged = {name: _staged(name, x, stream_ptr) for name, x in arrays.items()}
        out = arrays["out"]
        if out is not None and not _device.loads_16_bytes(out):
            staged["out"] = cupy.empty(p.out_shape, out.dtype)
        plan = _Plan(p, staged)
        if all(x is arguments[name] for name, x in staged.items()):
            _plans.remember(key, plan)
        result = plan.run(staged)
        if staged["out"] is not out:
            _device.assign(out, staged["out"])
            result = out, *result[1:]
        del staged
    return result


def _staged(name: str, x: Any, stream_ptr: int) -> Any:
    """`x` as the kernel reads it: q and kv by rows of 16 bytes, int32 indices along a contiguous last axis."""
    if x is None or name in _OUTPUTS:
        return x
    if isinstance(x, np.ndarray):
        x = _device.upload(name, x, stream_ptr)
    if name in ("q", "kv"):
        reads = _device.loads_16_bytes(x) and (name == "q" or abs(x.strides[0]) < 2**31)  # kv_row_bytes is int32
        return x if reads else _device.contiguous(x)
    if name == "indices":
        if x.dtype != np.int32:
            return _device.as_int32(x)
        return x if x.shape[-1] == 1 or x.strides[-1] == 4 else _device.contiguous(x)
    return _device.as_vector(x, np.float32 if name == "attn_sink" else np.int32)


# ---- plan and launch ----
class _Plan:
    """One call worked out but for its pointers: kernel, grid, parameter bytes."""

    def __init__(self, p: SparsePrefillProblem, arrays: dict[str, Any]) -> None:
        """`arrays`: the call's arguments by name, checked and directly usable, all on the current device."""
        q, kv, indices, out, max_logits, lse = (arrays[name] for name in (*_REQUIRED, *_OUTPUTS))
        device_id, self.problem, self.dtype = q.data.device_id, p, q.dtype
        self.overlap, self.empty = _overlap.watch(arrays), p.nothing_to_attend
        if self.empty:
            return
        self.kernel = _device.get_kernel(Problem("sparse_prefill", p.dtype, p.d_qk, HEAD_DIM_V), device_id)
        rounds = -(-p.items // _device.info(device_id).sm_count)  # persistent: a CTA fills an SM
        self.grid = (-(-p.items // rounds), 1, 1)  # no more of them than the rounds need
        float32 = np.dtype(np.float32)
        strides = {
            **_device.element_strides("q", q.strides[:2], q.dtype, "token head"),
            **_device.element_strides("indices", indices.strides[:1], indices.dtype, "token"),
            **_device.element_strides("out", _device.strides_of(out, p.out_shape, q.dtype)[:2], q.dtype, "token head"),
        }
        for name, x in (("max_logits", max_logits), ("lse", lse)):
            strides |= _device.element_strides(name, _device.strides_of(x, p.row_shape, float32), float32, "token head")
        magic, shift = kernel_params.divisor(p.head_blocks)
        self.params = _device.ParamTemplate(
            "SparsePrefillParams", **strides, kv_row_bytes=kv.strides[0], items=p.items, head_blocks=p.head_blocks,
            head_blocks_magic=magic, head_blocks_shift=shift, h_q=p.h_q, s_kv=p.s_kv, topk=p.topk,
            requests=p.requests or 0, scale_log2=p.sm_scale * math.log2(math.e))

    def run(self, arrays: dict[str, Any]) -> tuple[cupy.ndarray, cupy.ndarray, cupy.ndarray]:
        """Launches on the current device, which is q's; the arrays have the signatures that the plan was made for.

        Raises ValueError where what the call writes overlaps another argument.
        """
        p, out, max_logits, lse = self.problem, *(arrays[name] for name in _OUTPUTS)
        pointers = tuple(_device.pointer(arrays[name]) for name in _POINTERS)
        if self.overlap is not None:
            addresses = (*pointers, *map(_device.pointer, (out, max_logits, lse)))
            if addresses not in self.overlap.known:
                self.overlap.look(addresses, arrays)
        if out is None:
            out = cupy.empty(p.out_shape, self.dtype)
        max_logits, lse = (cupy.empty(p.row_shape, np.float32) if x is None else x for x in (max_logits, lse))
        if self.empty:
            _device.assign(out.view(np.uint16), 0)
            _device.assign(max_logits, -np.inf)
            _device.assign(lse, -np.inf)
            return out, max_logits, lse
        params = self.params.fill(*pointers, out.data.ptr, max_logits.data.ptr, lse.data.ptr)
        self.kernel.launch(self.grid, params, pdl=True, stream_ptr=_device.current_stream_ptr())
        return out, max_logits, lse
