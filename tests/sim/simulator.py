"""Runs the kernels' own text on the CPU: cuda_src compiled with g++ over tests/sim/gpu.hpp, one thread a CUDA thread.

`simulated_gpu` puts it behind the public API: cupy.ndarray objects over host memory, plans and launches as on a GPU.
"""

from __future__ import annotations

import ctypes
import functools
import re
import shutil
import struct
import subprocess
from pathlib import Path
from typing import Any

import cupy
import numpy as np

from flashmla_cupy.runtime.spec import KernelSpec

HERE = Path(__file__).resolve().parent
CUDA_SRC = HERE.parents[1] / "cuda_src"
COMPILER = shutil.which("g++")
_ALIGNMENT = 1024
_SHARED = re.compile(r"extern __shared__ (?:__align__\(\d+\) )?(\w+) (\w+)\[\];")


def build(spec: KernelSpec, folder: Path) -> ctypes.CDLL:
    """The kernel variant as a library with `threads()` and `launch(params, x, y, z)`."""
    source = folder / spec.entry
    if not source.exists():
        shutil.copytree(CUDA_SRC, source, ignore=shutil.ignore_patterns("ptx"))
        shutil.copytree(HERE / "ptx", source / "ptx")
        kernel = source / spec.kernel_file
        kernel.write_text(_SHARED.sub(r"\1* \2 = reinterpret_cast<\1*>(sim::cta().shared);", kernel.read_text()))
        arguments = f"<{', '.join(spec.config)}>" if spec.config else ""
        (source / "unit.hpp").write_text(
            f'#include "common/params.cuh"\n#include "{spec.kernel_file}"\nusing Params = flashmla::{spec.params};\n'
            f"namespace flashmla {{ using UnitConfig = {spec.op}::Config{arguments}; }}\n"
            f"using Config = flashmla::UnitConfig;\n"
            f"inline void run(const Params& params) {{ flashmla::{spec.op}::kernel<Config>(params); }}\n"
        )
        command = [COMPILER, "-O2", "-w", "-std=c++17", "-shared", "-fPIC", "-pthread", f"-I{source}", f"-I{HERE}"]
        command += [str(HERE / "main.cpp"), "-o", str(source / "kernel.so")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr[:3000]
    return ctypes.CDLL(str(source / "kernel.so"))


class Kernel:
    """Stands for runtime.launch.Kernel."""

    def __init__(self, spec: KernelSpec, folder: Path) -> None:
        self.spec, self._library = spec, build(spec, folder)

    def launch(self, grid: tuple[int, int, int], params: bytes, pdl: bool = False, stream_ptr: int = 0) -> None:
        block = aligned(len(params))  # alive until the kernel has ended
        block[:] = np.frombuffer(params, np.uint8)
        self._library.launch(ctypes.c_void_p(block.ctypes.data), *map(ctypes.c_uint, grid))


def aligned(nbytes: int) -> np.ndarray:
    """Host memory at a multiple of 1024."""
    buffer = np.zeros(nbytes + _ALIGNMENT, np.uint8)
    return buffer[-buffer.ctypes.data % _ALIGNMENT :][:nbytes]


class Memory:
    """Host memory that cupy.ndarray objects may lie over."""

    def __init__(self) -> None:
        self._buffers: list[np.ndarray] = []

    def alloc(self, nbytes: int) -> cupy.cuda.MemoryPointer:
        buffer = aligned(max(nbytes, 1))
        self._buffers.append(buffer)
        return cupy.cuda.MemoryPointer(cupy.cuda.UnownedMemory(buffer.ctypes.data, nbytes, None, 0), 0)

    def put(self, x: np.ndarray) -> cupy.ndarray:
        """A C-contiguous copy of `x`."""
        array = cupy.ndarray(x.shape, x.dtype, self.alloc(x.nbytes))
        host(array)[...] = x
        return array


def host(x: cupy.ndarray) -> np.ndarray:
    """The same memory as a NumPy array."""
    first = sum(min(0, stride * (length - 1)) for stride, length in zip(x.strides, x.shape, strict=True))
    last = sum(max(0, stride * (length - 1)) for stride, length in zip(x.strides, x.shape, strict=True))
    if x.size == 0:
        return np.empty(x.shape, x.dtype)
    raw = (ctypes.c_ubyte * (last - first + x.dtype.itemsize)).from_address(x.data.ptr + first)
    return np.ndarray(x.shape, x.dtype, raw, -first, x.strides)


def encode(ptr: int, dtype_name: str, shape: tuple, strides_bytes: tuple, box: tuple, **_: Any) -> np.ndarray:
    """SimulatedMap of ptx/cp_async_bulk.cuh in place of a tensor map."""
    element_bytes = 4 if dtype_name == "float32" else 2
    strides, extents = (element_bytes, *strides_bytes), tuple(shape)
    missing = (0,) * (5 - len(shape))
    data = struct.pack("<13q", ptr, *strides, *missing, *extents, *missing, box[1], element_bytes)
    return np.frombuffer(data.ljust(128, b"\0"), np.uint8)


@functools.cache
def kernel(spec: KernelSpec, folder: Path) -> Kernel:
    return Kernel(spec, folder)
