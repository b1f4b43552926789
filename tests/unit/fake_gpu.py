"""A GPU that is not there: real cupy.ndarray objects over addresses of no memory, and launches that are recorded.

It lets the plan logic of the public API run where there is no driver. Nothing may read or write the arrays.
"""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import cupy
import ml_dtypes
import numpy as np
import pytest

from flashmla_cupy.ops import _device, _plans, _select, combine, sched_meta
from flashmla_cupy.runtime import params, tensor_map
from flashmla_cupy.runtime.device import DeviceInfo

BF16 = np.dtype(ml_dtypes.bfloat16)
H200 = DeviceInfo("NVIDIA H200", (9, 0), "sm_90a", 132, 232448)
STREAM = 0x51


@dataclass
class Launch:
    name: str  # of the kernel spec
    grid: tuple[int, int, int]
    params: np.ndarray  # a record of the kernel's parameter struct
    pdl: bool
    stream: int
    device: int


@dataclass
class FakeGpu:
    """`events`: launches, copies and assignments in order, as Launch or tuples."""

    info: DeviceInfo = H200
    device: int = 0
    capturing: bool = False
    events: list[Any] = field(default_factory=list)
    maps: list[dict[str, Any]] = field(default_factory=list)  # of caches
    partial_maps: list[dict[str, Any]] = field(default_factory=list)  # of partial outputs
    graph_bytes: int = 0  # allocated as graph nodes
    home: int = 0  # the device of arrays for which none is named
    blocks: list[tuple[int, int, int]] = field(default_factory=list)  # address, bytes, device
    _next: int = 0x7F00_0000_0000

    @property
    def launches(self) -> list[Launch]:
        return [event for event in self.events if isinstance(event, Launch)]

    def take(self) -> list[Launch]:
        launches = self.launches
        self.events.clear()
        return launches

    def alloc(self, nbytes: int) -> cupy.cuda.MemoryPointer:
        address, self._next = self._next, self._next + -(-max(nbytes, 1) // 512) * 512
        self.blocks.append((address, nbytes, self.device))
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(address, nbytes, None, self.device), 0)

    def device_of(self, address: int) -> int:
        return next(device for first, nbytes, device in self.blocks if first <= address < first + nbytes)

    def devices_of(self, launch: Launch) -> set[int]:
        """Of everything that a kernel gets an address of."""
        record = launch.params
        addresses = [int(record[name]) for name, (dtype, *_) in record.dtype.fields.items() if dtype == np.uint64]
        return {self.device_of(address) for address in addresses if address}

    def graph_alloc(self, nbytes: int) -> cupy.cuda.MemoryPointer:
        self.graph_bytes += nbytes
        return self.alloc(nbytes)

    def array(self, shape: tuple[int, ...], dtype: Any = BF16, offset_bytes: int = 0, strides=None, device=None):
        dtype = np.dtype(dtype)
        before, self.device = self.device, self.home if device is None else device
        reach = sum(max(0, stride) * length for stride, length in zip(strides or (), shape, strict=False))
        memory = self.alloc(max(int(np.prod(shape)) * dtype.itemsize, reach) + offset_bytes + 4096)
        self.device = before
        return cupy.ndarray(shape, dtype, memory + offset_bytes, strides)

    def decode(self, batch=2, s_q=1, h_q=16, h_kv=1, d_qk=576, dtype=BF16, page_size=64, pages=40, width=8, **extra):
        """Keyword arguments of a call; page_size 0: contiguous cache of `width` * 64 tokens."""
        arguments = dict(q=self.array((batch, s_q, h_q, d_qk), dtype), head_dim_v=512,
                         cache_seqlens=self.array((batch,), np.int32))
        if page_size:
            arguments["k_cache"] = self.array((pages, page_size, h_kv, d_qk), dtype)
            arguments["block_table"] = self.array((batch, width), np.int32)
        else:
            arguments["k_cache"], arguments["block_table"] = self.array((batch, width * 64, h_kv, d_qk), dtype), None
        return {**arguments, **extra}

    def metadata(self, batch=2, parts=132):
        return dict(tile_scheduler_metadata=self.array((parts, 8), np.int32),
                    num_splits=self.array((batch + 1,), np.int32))


class _Kernel:
    def __init__(self, gpu: FakeGpu, spec) -> None:
        self._gpu, self._spec, self._device = gpu, spec, gpu.device

    def launch(self, grid, data, pdl=False, stream_ptr=None) -> None:
        dtype = params.STRUCTS[self._spec.params]
        assert type(data) is bytes and len(data) == dtype.itemsize
        assert self._gpu.device == self._device, "a kernel is loaded on one device"
        record = np.frombuffer(data, dtype)[0]
        self._gpu.events.append(Launch(self._spec.name, grid, record, pdl, stream_ptr, self._gpu.device))


@pytest.fixture
def gpu(monkeypatch) -> FakeGpu:
    from flashmla_cupy.runtime import compile as kernel_compile
    from flashmla_cupy.runtime import device

    fake = FakeGpu()

    @contextlib.contextmanager
    def on_device(device_id):
        before, fake.device = fake.device, device_id
        try:
            yield
        finally:
            fake.device = before

    def contiguous(x, dtype=None):
        copy = cupy.empty(x.shape, x.dtype if dtype is None else dtype)
        fake.events.append(("copy", x, copy))
        return copy

    def upload(x):
        copy = cupy.empty(x.shape, x.dtype)
        fake.events.append(("upload", x, copy))
        return copy

    def encode(ptr, **arguments):
        maps = fake.partial_maps if len(arguments["shape"]) == 3 else fake.maps
        maps.append(dict(arguments, ptr=ptr))
        return np.full(128, len(maps), np.uint8)

    for target, name, value in (
        (_device, "current_device", lambda: fake.device), (_device, "current_stream_ptr", lambda: STREAM),
        (_device, "on_device", on_device), (_device, "info", lambda device_id: fake.info),
        (_device, "contiguous", contiguous), (_device, "as_int32", lambda x: contiguous(x, np.int32)),
        (_device, "assign", lambda *pair: fake.events.append(("assign", *pair))),
        (device, "is_capturing", lambda stream: fake.capturing), (cupy, "asarray", upload),
        (kernel_compile, "get_kernel", lambda spec: _Kernel(fake, spec)), (tensor_map, "encode", encode),
        (cupy.cuda, "malloc_async", fake.graph_alloc),
    ):
        monkeypatch.setattr(target, name, value)
    _plans.clear_plans(), sched_meta._template.cache_clear(), combine._direct.cache_clear()
    with cupy.cuda.using_allocator(fake.alloc), _select.experimental_kernels():
        yield fake
    _plans.clear_plans()
