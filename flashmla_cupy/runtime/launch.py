"""Kernel: a loaded function and its launch through cuLaunchKernelEx, with cluster and PDL attributes."""

from __future__ import annotations

import ctypes
import threading

import numpy as np

from . import driver, env
from .inspect import Record
from .params import STRUCTS
from .spec import KernelSpec


class _LaunchState(threading.local):
    """What one thread needs to launch one kernel: the parameter block and two configurations (without, with PDL)."""

    def __init__(self, record: Record) -> None:
        self.block = (ctypes.c_ubyte * record.params_bytes)()
        self.view = memoryview(self.block).cast("B")
        self.pointers = (ctypes.c_void_p * 1)(ctypes.addressof(self.block))
        self.pointers_address = ctypes.addressof(self.pointers)
        self.configs = (_config(record, pdl=False), _config(record, pdl=True))


def _config(record: Record, pdl: bool):
    cu = driver.cu()
    attributes = []
    if record.cluster > 1:
        cluster = cu.CUlaunchAttribute()
        cluster.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = record.cluster, 1, 1
        attributes.append(cluster)
    if pdl:
        serialization = cu.CUlaunchAttribute()
        serialization.id = cu.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        serialization.value.programmaticStreamSerializationAllowed = 1
        attributes.append(serialization)
    config = cu.CUlaunchConfig()
    config.blockDimX, config.blockDimY, config.blockDimZ = record.threads, 1, 1
    config.sharedMemBytes = record.smem_bytes
    config.attrs, config.numAttrs = attributes, len(attributes)
    return config


class Kernel:
    """One kernel on one device. Launching is thread-safe: each thread has its own parameter block."""

    def __init__(self, spec: KernelSpec, record: Record, module: object, function: object) -> None:
        """`module` and `function` are CuPy's (cupy.cuda.function); the module is kept so that it stays loaded."""
        if record.params_bytes != STRUCTS[spec.params].itemsize:
            raise ValueError(f"{spec.name}: record has {record.params_bytes} parameter bytes, params.py has "
                             f"{STRUCTS[spec.params].itemsize}")  # fmt: skip
        self.spec, self.record = spec, record
        self._module, self._function, self._address = module, function, function.ptr
        self._allow_pdl = env.pdl_enabled()
        self._state = _LaunchState(record)
        self._launch = driver.cu().cuLaunchKernelEx

    def launch(
        self,
        grid: tuple[int, int, int],
        params: bytes | np.ndarray,
        pdl: bool = False,
        stream_ptr: int | None = None,
    ) -> None:
        """Enqueue one launch of grid (x, y, z) blocks; x must be a multiple of the cluster.

        `params` is a record of params.new(spec.params), or its bytes; copied, so the caller may reuse it at once. `pdl`
        lets the launch begin before its predecessor on the stream ends (the kernel must wait with griddepcontrol).
        `stream_ptr` None is CuPy's current stream. Raises FlashMLAError with the driver's error.
        """
        if stream_ptr is None:
            stream_ptr = _current_stream_ptr()
        state = self._state
        state.view[:] = params if isinstance(params, bytes) else params.tobytes()
        config = state.configs[pdl and self._allow_pdl]
        config.gridDimX, config.gridDimY, config.gridDimZ = grid
        config.hStream = stream_ptr
        (result,) = self._launch(config, self._address, state.pointers_address, 0)
        if result:
            record = self.record
            driver.check(
                result,
                f"launch of {self.spec.name}, grid {grid}, {record.threads} threads, cluster {record.cluster}, "
                f"{record.smem_bytes} bytes of shared memory",
            )

    def __repr__(self) -> str:
        return f"Kernel({self.spec.name}, {self.record})"


def _current_stream_ptr() -> int:
    from cupy.cuda import get_current_stream

    return get_current_stream().ptr
