"""Merging partial attention results by their log-sum-exps."""

from __future__ import annotations

import functools
import math
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import cupy
import numpy as np

from flashmla_cupy import backends
from flashmla_cupy.runtime import params as kernel_params

from . import _checks, _device, _plans
from ._checks import HEAD_DIM_V
from ._select import Problem

_DTYPES = {"bfloat16": _checks.Q_DTYPES["bfloat16"], "float16": np.dtype(np.float16), "float32": np.dtype(np.float32)}


def merge_states(outs: Any, lses: Any) -> tuple[Any, Any]:
    """One attention result from n results over disjoint parts of the keys, by their natural-log log-sum-exps.

    out = sum_i exp(lse_i - lse) out_i and lse = log sum_i exp(lse_i). A partial result of lse -inf has no weight,
    whatever it holds; if all are -inf, the merged row is zeros and -inf.

    Args:
        outs: n >= 1 partial results, as an array (n, ..., d_v) or a sequence of arrays (..., d_v); float32, bfloat16
            or float16, d_v a multiple of 4.
        lses: their log-sum-exps float32, as an array (n, ...) or a sequence. For results of four axes
            (batch, s_q, h_q, d_v) each is (batch, h_q, s_q), as flash_mla_with_kvcache returns it; for any other
            number of axes it has the shape of the result without d_v. Empty is -inf only: +inf, which
            flashmla_cupy.torch (like FlashMLA) returns for a row that attends to nothing, is a ValueError in NumPy
            arrays; on a GPU nothing looks at the values, and such a row becomes NaN.

    Returns:
        out (..., d_v) of the type of outs and lse float32 in the layout of one lses. CuPy arrays on the device of outs
        and CuPy's current stream there, NumPy arrays for NumPy arrays.

    Raises:
        TypeError, ValueError: a wrong argument. UnsupportedError: no kernel for the device.
    """
    on_host = _is_on_host(outs)
    outs, lses = _parts("outs", outs, 2, on_host), _parts("lses", lses, 1, on_host)
    shape, dtype, by_head = _check(outs, lses)
    if on_host:
        return _merge_on_host(outs, lses, dtype, by_head)
    device_id = outs[0].data.device_id
    if math.prod(shape[:-1]) > _MOST_ROWS or shape[-1] > _MOST_COLUMNS:
        raise ValueError(f"outs: got partial results of shape {shape}, expected at most {_MOST_ROWS} rows and "
                         f"{_MOST_COLUMNS} columns on a GPU")
    for name, group in (("outs", outs), ("lses", lses)):
        for x in group:
            _checks.check_same_device(device_id, **{name: x})
            _checks.check_element_alignment(**{name: x})
    with _device.on_device(device_id):
        return _merge_on_device(outs, lses, shape, dtype, by_head, device_id)


def _is_on_host(outs: Any) -> bool:
    if isinstance(outs, (list, tuple)):
        if len(outs) == 0:
            raise ValueError("outs: got no partial results, expected at least 1")
        outs = outs[0]
    return backends.backend_of("outs", outs) == "numpy"


def _parts(name: str, x: Any, min_ndim: int, on_host: bool) -> Any:
    """A list of arrays (also of none but scalars), or one stacked array, of the NumPy or the CuPy backend."""
    convert = backends.as_host if on_host else backends.as_device
    if isinstance(x, (list, tuple)):
        x = [convert(name, part) for part in x]
    else:
        x = convert(name, x)
        if x.ndim < min_ndim:
            raise ValueError(f"{name}: got shape {x.shape}, expected at least {min_ndim} axes, the results first")
    if len(x) == 0:
        raise ValueError(f"{name}: got no partial results, expected at least 1")
    return x


def _check(outs: Any, lses: Any) -> tuple[tuple[int, ...], np.dtype, bool]:
    """Shape (..., d_v) and dtype of one partial result, and whether its lse is (batch, h_q, s_q)."""
    if len(outs) != len(lses):
        raise ValueError(f"lses: got {len(lses)} log-sum-exps, expected {len(outs)}, one for each of outs")
    shape, dtype = tuple(map(int, outs[0].shape)), outs[0].dtype
    if dtype not in _DTYPES.values():
        raise TypeError(f"outs: got dtype {dtype}, expected {', '.join(_DTYPES)}")
    if not shape or shape[-1] < 4 or shape[-1] % 4:
        raise ValueError(f"outs: got partial results of shape {shape}, expected a last axis of a multiple of 4")
    by_head = len(shape) == 4
    lse_shape = (shape[0], shape[2], shape[1]) if by_head else shape[:-1]
    for out, lse in zip(outs, lses, strict=True):
        _checks.check_shape("outs", out, shape, "like the first")
        _checks.check_dtype("outs", out, dtype)
        _checks.check_shape("lses", lse, lse_shape, "(batch, h_q, s_q)" if by_head else "as outs without its last axis")
        _checks.check_dtype("lses", lse, np.dtype(np.float32))
    return shape, dtype, by_head


def _swap_heads(lse: Any) -> Any:
    """(..., h_q, s_q) <-> (..., s_q, h_q)."""
    return lse.swapaxes(-1, -2)


def _merge_on_host(outs: Any, lses: Any, dtype: np.dtype, by_head: bool) -> tuple[np.ndarray, np.ndarray]:
    from flashmla_cupy.reference import combine as reference
    from flashmla_cupy.reference._numerics import cast, widen

    outs, lses = np.stack([widen(x) for x in outs]), np.stack([widen(x) for x in lses])
    if np.isposinf(lses).any():
        raise ValueError("lses: got +inf, expected -inf for a result over no keys (flashmla_cupy.torch has +inf there)")
    out, lse = reference.merge(outs, _swap_heads(lses) if by_head else lses, xp=np)
    lse = _swap_heads(lse) if by_head else lse
    return cast(out, dtype), np.asarray(cast(lse, np.float32), order="C")  # an array also where it has no axes


def _merge_on_device(outs, lses, shape, dtype, by_head, device_id) -> tuple[cupy.ndarray, cupy.ndarray]:
    n, d_v, rows = len(outs), shape[-1], math.prod(shape[:-1])
    out = cupy.empty(shape, dtype)
    lse = cupy.empty(lses[0].shape, np.float32)
    if out.size == 0:
        return out, lse
    stream_ptr = _device.current_stream_ptr()
    kernel = _device.get_kernel(Problem("combine", dtype.name, d_v=d_v), device_id)
    with _device.temporaries(stream_ptr):
        _launch(kernel, outs, lses, out, lse, n, rows, d_v, by_head, stream_ptr)
    return out, lse


def _launch(kernel, outs, lses, out, lse, n, rows, d_v, by_head, stream_ptr) -> None:
    """Temporaries (the stacked float32 partial results) are gone when this returns."""
    outs = _stacked(outs)
    # The kernel merges rows in the order of out; with one query or one head the two orders of lse are the same.
    reorder = by_head and 1 not in lse.shape[1:]
    lses = _stacked(lses, swap_heads=reorder)
    lse_rows = cupy.empty(rows, np.float32) if reorder else lse
    grid, template = _direct(n, rows, d_v, _device.info(_device.current_device()).sm_count)
    params = template.fill(outs.data.ptr, lses.data.ptr, out.data.ptr, lse_rows.data.ptr, 0, 0)
    kernel.launch(grid, params, pdl=True, stream_ptr=stream_ptr)
    if reorder:
        batch, h_q, s_q = lse.shape
        _device.assign(lse, _swap_heads(lse_rows.reshape(batch, s_q, h_q)))


_WARPS, _COLUMNS = 16, 512  # of a block: Config of cuda_src/combine; an SM holds one block
_MOST_ROWS, _MOST_COLUMNS = 2**31 - _WARPS, 65535 * _COLUMNS  # int32 with the last block's warps; of the grid's y axis


# The kernels for fp16 partial results: a warp merges a row; or two rows; or two partial results at once, of a quarter
# of the columns. Their results differ in rounding alone.
VARIANTS = ("plain", "pairs", "quarters")
_variant: str | None = None  # None: by the shape


class Shape(NamedTuple):
    """How a launch shares the work: see cuda_src/combine/kernel_sm80.cuh."""

    row_groups: int
    requests: int
    warps_per_row: int
    column_groups: int
    variant: str = "plain"


def shape(rows: int, split_requests: int, h_kv: int, partials: float, sm_count: int, half: bool = False,
          variant: str | None = None) -> Shape:
    """For at most `split_requests` requests with about `partials` partial results each, in fp16 or (not half) float32.

    As many warps share a row as have four partial results each, fewer where the blocks would not all fit at once. Of
    more than 16 requests as many have blocks as there is room for; these take the others in turn, and so do blocks of
    rows for which there is no room. Where there is room and a warp has more than four, two blocks share the columns.

    fp16, unless a variant is asked for: pairs rather than taking turns, where there are about two partial results
    (graph 16,128,2,4096 62.5 to 63.2 us, 64.0 by plain); quarters where a warp has more than four and four blocks can
    share the columns (graph 1,16,1,131072 47.9 to 48.1 us, 48.6 by plain).
    """
    room, warps, any_variant = sm_count // h_kv, 1, half and variant is None
    while warps < _WARPS and partials > 4 * warps:
        warps *= 2
    while warps > 1 and -(-rows * warps // _WARPS) * min(split_requests, 16) > room:
        warps //= 2
    row_groups = -(-rows * warps // _WARPS)
    if any_variant and warps == 1 and partials < 3 and row_groups * min(split_requests, 16) > room:
        variant = "pairs"
    if variant == "pairs":
        warps, row_groups = 1, -(-rows // (2 * _WARPS))
    requests = min(split_requests, max(16, room // row_groups))
    many = variant != "pairs" and partials > 4 * warps
    if any_variant and many and 4 * row_groups * requests <= room:
        variant = "quarters"
    columns = 4 if variant == "quarters" else 2 if many and 2 * row_groups * requests <= room else 1
    return Shape(min(row_groups, max(1, room // requests)), requests, warps, columns, variant or "plain")


def with_variant(wanted: str) -> AbstractContextManager[None]:
    """Within, fp16 partial results are merged by that one of VARIANTS: to compare."""
    return _plans.while_set(globals(), "_variant", wanted)


class AfterSplit:
    """The launch behind a decode kernel that merges what the plan has split: all but its pointers."""

    def __init__(self, batch: int, parts: int, dtype: str, half: bool, device_id: int, fields: dict[str, int]) -> None:
        """half: partial outputs are fp16 with factors, not float32. fields: of CombineParams, sizes and strides."""
        rows, h_kv = fields["s_q"] * fields["heads_per_kv"], fields["h_kv"]
        # Each part but the first can begin inside one request.
        split = shape(rows, min(parts - 1, batch), h_kv, parts / batch, _device.info(device_id).sm_count, half,
                      _variant if half else None)
        op = f"combine.half.{split.variant}" if half else "combine"
        self._kernel = _device.get_kernel(Problem(op, dtype, d_v=HEAD_DIM_V), device_id)
        self._grid = split.row_groups * split.column_groups, split.requests, h_kv
        magic, shift = kernel_params.divisor(fields["heads_per_kv"])
        self._params = _device.ParamTemplate(
            "CombineParams", **fields, batch=batch, num_sm_parts=parts, d_v=HEAD_DIM_V, lse_in_scale=1.0,
            warps_per_row_shift=split.warps_per_row.bit_length() - 1,
            column_groups_shift=split.column_groups.bit_length() - 1, heads_per_kv_magic=magic,
            heads_per_kv_shift=shift)

    def launch(self, o_partial: int, lse_partial: int, out: int, lse: int, metadata: int, attn_sink: int,
               stream_ptr: int) -> None:
        """All pointers are device addresses; attn_sink may be 0."""
        params = self._params.fill(o_partial, lse_partial, out, lse, metadata, attn_sink)
        self._kernel.launch(self._grid, params, pdl=True, stream_ptr=stream_ptr)


def _stacked(parts: Any, swap_heads: bool = False) -> cupy.ndarray:
    """(n, ...) float32, C-contiguous and 16-byte aligned; the given array itself when it is that."""
    whole = not isinstance(parts, list) and not swap_heads
    if whole and parts.dtype == np.float32 and parts.flags.c_contiguous and parts.data.ptr % 16 == 0:
        return parts
    first = _swap_heads(parts[0]) if swap_heads else parts[0]
    stacked = cupy.empty((len(parts), *first.shape), np.float32)
    for target, part in zip(stacked, parts, strict=True):
        _device.assign(target, _swap_heads(part) if swap_heads else part)
    return stacked


@functools.lru_cache(maxsize=256)
def _direct(n: int, rows: int, d_v: int, sm_count: int) -> tuple[tuple[int, int, int], _device.ParamTemplate]:
    """Direct mode: rows as the query tokens of one request with one head; blocks of y share the columns."""
    merged = shape(rows, 1, 1, n, sm_count)
    return (merged.row_groups, -(-d_v // _COLUMNS), 1), _device.ParamTemplate(
        "CombineParams", out_stride_token=d_v, lse_stride_token=1, batch=1, s_q=rows, heads_per_kv=1, h_kv=1,
        num_sm_parts=1, n_direct=n, d_v=d_v, warps_per_row_shift=merged.warps_per_row.bit_length() - 1,
        lse_in_scale=math.log2(math.e))
