"""The GPU side that all operations share: where to run, where temporary memory comes from, parameter bytes."""

from __future__ import annotations

import contextlib
import math
import struct
import threading
from collections.abc import Callable
from typing import Any

import cupy
import numpy as np

from flashmla_cupy.runtime import compile as kernel_compile
from flashmla_cupy.runtime import device, params, tensor_map
from flashmla_cupy.runtime.launch import Kernel

from . import _select
from ._checks import HEAD_DIM_V

current_device = cupy.cuda.runtime.getDevice


def current_stream_ptr() -> int:
    """CuPy's current stream on the current device."""
    return cupy.cuda.get_current_stream().ptr


def on_device(device_id: int) -> contextlib.AbstractContextManager:
    """Makes `device_id` the current device for a while."""
    return cupy.cuda.Device(device_id)


def info(device_id: int) -> device.DeviceInfo:
    return device.info(device_id)


def get_kernel(problem: _select.Problem, device_id: int) -> Kernel:
    """The kernel for `problem` on the current device, which is `device_id`. Raises UnsupportedError, CaptureError."""
    return kernel_compile.get_kernel(_select.select(problem, info(device_id)))


class _ThreadState(threading.local):
    graphs_own_memory = False  # CuPy's allocator already gives captured graphs memory of their own


_state = _ThreadState()


def scratch(nbytes: int, stream_ptr: int) -> cupy.cuda.MemoryPointer:
    """Memory that lives until the launches enqueued by the caller have run, even if the caller drops it at once.

    Memory of CuPy's pool is recycled in stream order. A captured graph runs later, when the pool may have given the
    memory away; so during a capture it becomes allocation nodes, which the graph owns.
    """
    if not _state.graphs_own_memory and device.is_capturing(stream_ptr):
        return cupy.cuda.malloc_async(nbytes)
    return cupy.cuda.alloc(nbytes)


@contextlib.contextmanager
def temporaries(stream_ptr: int):
    """Within, CuPy arrays that only live until the end of the call may be made; see `scratch`."""
    if not _state.graphs_own_memory and device.is_capturing(stream_ptr):
        with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
            yield
    else:
        yield


@contextlib.contextmanager
def memory_from(allocator: Callable[[int], cupy.cuda.MemoryPointer]):
    """Within, all memory comes from `allocator`, which must know about graph captures itself (torch's does)."""
    before, _state.graphs_own_memory = _state.graphs_own_memory, True
    try:
        with cupy.cuda.using_allocator(allocator):
            yield
    finally:
        _state.graphs_own_memory = before


def upload(name: str, x: np.ndarray, stream_ptr: int) -> cupy.ndarray:
    """A small host array on the current device, copied in stream order without waiting.

    Raises ValueError during a capture: a graph would replay the values of now.
    """
    if device.is_capturing(stream_ptr):
        raise ValueError(f"{name}: got a host array while its stream is captured into a CUDA graph, expected a device "
                         "array (a graph would replay today's values)")
    return cupy.asarray(np.ascontiguousarray(x))  # CuPy stages through pinned memory that it recycles by event


def contiguous(x: cupy.ndarray, dtype: Any = None) -> cupy.ndarray:
    """A new C-contiguous copy, at a multiple of 16 bytes."""
    return cupy.array(x, dtype=dtype, order="C")


def as_int32(x: cupy.ndarray) -> cupy.ndarray:
    """A new C-contiguous int32 copy, at a multiple of 16 bytes. Values beyond int32 become the nearest that it holds: a
    length beyond every cache, a place that is none."""
    if not np.can_cast(x.dtype, np.int32):
        x = cupy.clip(x, 0 if x.dtype.kind == "u" else -(2**31), 2**31 - 1)
    return contiguous(x, np.int32)


def as_vector(x: cupy.ndarray, dtype: Any, alignment: int = 1) -> cupy.ndarray:
    """x itself if C-contiguous, of `dtype` (int32 or float32) and at a multiple of `alignment` bytes; else a copy."""
    if x.dtype == dtype and x.flags.c_contiguous and x.data.ptr % alignment == 0:
        return x
    return as_int32(x) if dtype == np.int32 else contiguous(x, dtype)


def assign(target: cupy.ndarray, source: Any) -> None:
    """Writes `source` (an array or a number) into `target`, whatever its strides, and nowhere else."""
    target[...] = source


def pointer(x: cupy.ndarray | None) -> int:
    return 0 if x is None else x.data.ptr


def loads_16_bytes(x: cupy.ndarray) -> bool:
    """Whether every row along the last axis of an array is contiguous and begins at a multiple of 16 bytes."""
    if x.size == 0:
        return True
    return (x.data.ptr % 16 == 0 and x.strides[-1] == x.dtype.itemsize
            and all(stride % 16 == 0 for stride, length in zip(x.strides, x.shape[:-1], strict=False) if length > 1))


def strides_of(x: cupy.ndarray | None, shape: tuple[int, ...], dtype: np.dtype) -> tuple[int, ...]:
    """Byte strides of `x`, or those of the new C-contiguous array that stands for None."""
    if x is not None:
        return x.strides
    return tuple(dtype.itemsize * math.prod(shape[axis + 1:]) for axis in range(len(shape)))


def element_strides(array: str, strides: tuple[int, ...], dtype: np.dtype, axes: str) -> dict[str, int]:
    """Struct fields such as q_stride_batch, in elements."""
    elements = (stride // dtype.itemsize for stride in strides)
    return {f"{array}_stride_{axis}": stride for axis, stride in zip(axes.split(), elements, strict=True)}


def partial_bytes(parts: int, query_heads: int) -> tuple[int, int]:
    """Bytes of o_partial, and of o_partial with lse_partial behind it. query_heads: s_q * h_q."""
    o_bytes = 2 * parts * query_heads * HEAD_DIM_V * 4
    return o_bytes, -(-(o_bytes + 2 * parts * query_heads * 4) // 16) * 16


def half_partial_bytes(parts: int, query_heads: int) -> tuple[int, int]:
    """The same where partial outputs are fp16: behind the lse's lie two float32 factors a row."""
    rows = 2 * parts * query_heads
    o_bytes = rows * HEAD_DIM_V * 2
    return o_bytes, -(-(o_bytes + rows * 3 * 4) // 16) * 16


class TensorMaps(dict[int, bytes]):
    """`maps[ptr]`: the tensor map of what lies at an address, otherwise as `arguments` of tensor_map.encode say."""

    _MOST = 512  # caches (layers) that share a plan

    def __init__(self, arguments: dict[str, Any]) -> None:
        super().__init__()
        self._arguments = arguments

    def __missing__(self, ptr: int) -> bytes:
        if len(self) >= self._MOST:
            self.clear()
        self[ptr] = encoded = tensor_map.encode(ptr, **self._arguments).tobytes()
        return encoded


class ParamTemplate:
    """The bytes of a parameter struct with everything but its pointers filled in, wherever in it these are."""

    def __init__(self, struct_name: str, **fields: Any) -> None:
        dtype = params.STRUCTS[struct_name]
        record = params.new(struct_name)
        for name, value in fields.items():
            record[name] = value
        data, offsets = record.tobytes(), [dtype.fields[name][1] for name in dtype.names if dtype[name] == np.uint64]
        # Runs of consecutive pointers: how each is packed, which pointers it takes, and the bytes up to the next.
        starts = [i for i, offset in enumerate(offsets) if i == 0 or offset != offsets[i - 1] + 8]
        stops = [*starts[1:], len(offsets)]
        self._head, self._runs = data[:offsets[0]], []
        for start, stop in zip(starts, stops, strict=True):
            end = offsets[stop] if stop < len(offsets) else len(data)
            last = stop if stop < len(offsets) else None  # one pointer too many is noticed
            self._runs.append((struct.Struct(f"<{stop - start}Q").pack, slice(start, last),
                               data[offsets[stop - 1] + 8:end]))

    def fill(self, *pointers: int, head: bytes | None = None) -> bytes:
        """The struct with its pointers in order of declaration; `head`: the bytes before them (a tensor map)."""
        data = self._head if head is None else head
        for pack, which, after in self._runs:
            data += pack(*pointers[which]) + after
        return data
