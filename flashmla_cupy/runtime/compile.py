"""KernelSpec -> cubin, through NVRTC (no GPU needed) or the cache; cubin -> Kernel on the current device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

from ..errors import CaptureError, FlashMLAError, KernelCompileError
from . import cache, device, env, inspect, source
from .launch import Kernel
from .spec import KernelSpec

_ERROR_LINE = re.compile(r"^(?P<file>.+?)\((?P<line>\d+)\): (?:catastrophic )?error[^:]*: (?P<text>.*)$", re.MULTILINE)
_PTXAS_ERROR = re.compile(r"^.*(?:ptxas|nvrtc).*(?:error|fatal).*$", re.MULTILINE | re.IGNORECASE)
# ptxas gave up what the kernel was written for: wgmma serialised (C7510-C7515, C7520), setmaxnreg ignored (C7507-8).
_LOST_PERFORMANCE = re.compile(r"^.*(?:C7507|C7508|Potential Performance Loss).*$", re.MULTILINE)
NEEDED_NVRTC = (12, 9)  # older ones serialise the wgmma of kernels that newer ones do not


@dataclasses.dataclass(frozen=True)
class CompiledKernel:
    name: str
    entry: str
    arch: str
    cubin: bytes
    log: str
    record: inspect.Record
    resources: inspect.Resources
    seconds: float  # of the compilation, also when it came from the cache
    from_cache: bool

    @property
    def registers(self) -> int:
        return self.resources.registers

    @property
    def spill_bytes(self) -> int:
        return self.resources.spill_bytes

    @property
    def local_bytes(self) -> int:
        return self.resources.stack_bytes


_MAX_DYNAMIC_SMEM = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES

_compiled: dict[str, CompiledKernel] = {}  # cache key -> kernel: serves when there is no disk cache
_kernels: dict[tuple[int, KernelSpec], Kernel] = {}
_lock = threading.RLock()


@functools.cache
def nvrtc_version() -> tuple[int, int]:
    from cupy.cuda import nvrtc

    return nvrtc.getVersion()


def options(arch: str) -> tuple[str, ...]:
    """NVRTC options for `arch` under the current environment variables."""
    flags = [
        "-std=c++17",
        f"--gpu-architecture={arch}",
        f"-I{source.source_root()}",
        "--ptxas-options=-v",
        "-default-device",
    ]
    if env.lineinfo():
        flags.append("-lineinfo")
    if env.device_assert():
        flags.append("-DFLASHMLA_DEVICE_ASSERT=1")
    return tuple(flags)


def cache_key(unit: str, flags: Iterable[str]) -> str:
    """Digest of the unit (it states the digest of its includes), the options and the compiler.

    The include folder counts only where the cubin names files of it.
    """
    flags = tuple(flags)
    names_files = "-lineinfo" in flags or "-DFLASHMLA_DEVICE_ASSERT=1" in flags
    relevant = [flag for flag in flags if names_files or not flag.startswith("-I")]
    text = "\0".join([unit, *relevant, f"nvrtc {nvrtc_version()}"])
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def _run_nvrtc(spec: KernelSpec, unit: str, flags: tuple[str, ...], result: str = "getCUBIN") -> tuple[bytes, str]:
    """(code, log). Raises KernelCompileError."""
    from cupy.cuda import nvrtc

    program = nvrtc.createProgram(unit, f"{spec.entry}.cu", (), ())
    try:
        try:
            nvrtc.compileProgram(program, flags)
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelCompileError(_first_error(spec, log) or f"{spec.name}: {error}", log) from None
        code, log = getattr(nvrtc, result)(program), nvrtc.getProgramLog(program)
        return code, log
    except RuntimeError as error:  # NVRTCError, or CuPy about "compute_90", for which there is no cubin
        raise KernelCompileError(f"{spec.name}: {error}") from None
    finally:
        nvrtc.destroyProgram(program)


def _first_error(spec: KernelSpec, log: str) -> str | None:
    match = _ERROR_LINE.search(log)
    if match is None:
        match = _PTXAS_ERROR.search(log)
        return match and f"{spec.name}: {match[0].strip()}"
    file, root = os.path.normpath(match["file"]), str(source.source_root()) + os.sep
    place = "cuda_src/" + file.removeprefix(root) if file.startswith(root) else file
    return f"{spec.name}: {place}:{match['line']}: {match['text'].strip()}"


def _build(spec: KernelSpec, unit: str, flags: tuple[str, ...]) -> CompiledKernel:
    started = time.perf_counter()
    cubin, log = _run_nvrtc(spec, unit, flags)
    cubin = inspect.complete_elf(cubin)
    seconds = time.perf_counter() - started
    lost = _LOST_PERFORMANCE.search(log)
    if lost is not None:
        used, needed = (".".join(map(str, version)) for version in (nvrtc_version(), NEEDED_NVRTC))
        raise KernelCompileError(f"{spec.name}: {lost[0].strip()} (NVRTC {used}; {needed} or newer is needed)", log)
    return _describe(spec, cubin, log, seconds, from_cache=False)


def _describe(spec: KernelSpec, cubin: bytes, log: str, seconds: float, from_cache: bool) -> CompiledKernel:
    return CompiledKernel(
        spec.name, spec.entry, spec.arch, cubin, log, inspect.record(cubin), inspect.resources(log), seconds, from_cache
    )


def _dump(compiled: CompiledKernel, unit: str) -> None:
    folder = env.dump_dir()
    if folder is None:
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{compiled.name}.cu").write_text(unit, encoding="utf-8")
        (folder / f"{compiled.name}.cubin").write_bytes(compiled.cubin)
        (folder / f"{compiled.name}.log").write_text(compiled.log, encoding="utf-8")
    except OSError as error:
        env.logger().warning("%s: %s not dumped (%s)", env.DUMP_DIR.name, compiled.name, error)


@contextlib.contextmanager
def _readable_source(spec: KernelSpec) -> Iterator[None]:
    """The one place where a source file that cannot be read becomes a failed compilation."""
    try:
        yield
    except (OSError, UnicodeError) as error:
        raise KernelCompileError(f"{spec.name}: {error}") from error


def compile_cubin(spec: KernelSpec, arch: str | None = None, *, use_cache: bool = True) -> CompiledKernel:
    """Compile `spec` (for `arch` instead of its own, if given), or take it from the cache. Needs no GPU.

    Raises KernelCompileError with the first error and its place in cuda_src (nothing is cached then), and ValueError
    for an environment variable of env.py that cannot be used.
    """
    env.check()
    if arch is not None:
        spec = dataclasses.replace(spec, arch=arch)
    with _readable_source(spec):
        return _compile(spec, use_cache)


def _compile(spec: KernelSpec, use_cache: bool) -> CompiledKernel:
    flags = options(spec.arch)
    while True:
        unit = source.generate(spec)
        key = cache_key(unit, flags)
        compiled = _cached(spec, key) if use_cache else None
        if compiled is None:
            with cache.lock(spec.name, key):
                compiled = _cached(spec, key) if use_cache else None  # another process may have built it meanwhile
                if compiled is None:
                    compiled = _build(spec, unit, flags)
                    if source.generate(spec) != unit:
                        continue  # a source file changed under the compiler: what it read is unknown
                    header = {"spec": spec.name, "arch": spec.arch, "log": compiled.log, "seconds": compiled.seconds}
                    cache.store(spec.name, key, header, compiled.cubin)
                    env.logger().info("compiled %s in %.2f s", spec.name, compiled.seconds)
        _compiled[key] = dataclasses.replace(compiled, from_cache=True)
        _dump(compiled, unit)
        return compiled


def _cached(spec: KernelSpec, key: str) -> CompiledKernel | None:
    if key in _compiled:
        return _compiled[key]
    entry = cache.load(spec.name, key)
    if entry is None:
        return None
    header, cubin = entry
    return _describe(spec, cubin, header["log"], header["seconds"], from_cache=True)


def ptx(spec: KernelSpec) -> str:
    """PTX text of `spec`. Raises KernelCompileError."""
    arch = spec.arch.replace("sm_", "compute_")
    flags = tuple(flag for flag in options(arch) if not flag.startswith("--ptxas-options"))
    with _readable_source(spec):
        text, _ = _run_nvrtc(spec, source.generate(spec), flags, result="getPTX")
    return text.decode() if isinstance(text, bytes) else text


def get_kernel(spec: KernelSpec) -> Kernel:
    """The loaded kernel of `spec` on CuPy's current device; compiled and loaded at the first call.

    Raises CaptureError when it would have to be loaded while the current stream is captured into a graph.
    """
    from cupy.cuda import get_current_stream, runtime

    device_id = runtime.getDevice()
    kernel = _kernels.get((device_id, spec))
    if kernel is not None:
        return kernel
    if device.is_capturing(get_current_stream().ptr):
        raise CaptureError(
            f"{spec.name}: not loaded yet, and the current stream is being captured into a graph; make the same call "
            "once before the capture (and run `flashmla-cupy cache warmup` beforehand so that it compiles nothing)"
        )
    with _lock:
        kernel = _kernels.get((device_id, spec))
        if kernel is None:
            kernel = _kernels[device_id, spec] = _load(spec, device_id)
    return kernel


def _load(spec: KernelSpec, device_id: int) -> Kernel:
    from cupy.cuda import driver
    from cupy.cuda.function import Module

    compiled = compile_cubin(spec)
    module = Module()
    try:
        module.load(compiled.cubin)
        function = module.get_function(spec.entry)
        # For every kernel: it also ends lazy loading, which could otherwise fall into a graph capture.
        driver.funcSetAttribute(function.ptr, _MAX_DYNAMIC_SMEM, compiled.record.smem_bytes)
    except Exception as error:  # CuPy's CUDADriverError; its class is not public
        raise FlashMLAError(
            f"{spec.name}: cannot be loaded on device {device_id} ({device.info(device_id).arch}; "
            f"the kernel is for {spec.arch}): {error}"
        ) from error
    return Kernel(spec, compiled.record, module, function)


def forget() -> None:
    """Drop every kernel held in memory, so that the next call reads cuda_src again (the watch loop, tests)."""
    with _lock:
        _kernels.clear()
        _compiled.clear()


def warmup(
    specs: Iterable[KernelSpec],
    *,
    workers: int | None = None,
    on_done: Callable[[KernelSpec, CompiledKernel | Exception], None] | None = None,
) -> dict[KernelSpec, CompiledKernel | Exception]:
    """Compile `specs` into the cache, in parallel threads (NVRTC runs without the GIL). Needs no GPU, loads nothing.

    `on_done(spec, result)` runs in this thread's workers as each ends. A failed spec maps to its error. Raises
    ValueError for an environment variable that cannot be used.
    """
    env.check()
    specs = list(dict.fromkeys(specs))

    def build(spec: KernelSpec) -> CompiledKernel | Exception:
        try:
            result: CompiledKernel | Exception = compile_cubin(spec)
        except FlashMLAError as error:
            result = error
        if on_done is not None:
            on_done(spec, result)
        return result

    with ThreadPoolExecutor(workers or min(16, os.cpu_count() or 1)) as pool:
        return dict(zip(specs, pool.map(build, specs), strict=True))
