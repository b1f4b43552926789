"""What a run depends on besides this project's source: GPU, driver, compiler, library versions, settings."""

from __future__ import annotations

import platform
import re
from importlib import metadata
from pathlib import Path
from typing import Any

import flashmla_cupy
from flashmla_cupy.testing.machine import Machine

_DRIVER_FILE = Path("/proc/driver/nvidia/version")


def versions(machine: Machine) -> dict[str, Any]:
    """For records and measurements."""
    import cupy

    from flashmla_cupy.runtime import compile as runtime_compile

    api = cupy.cuda.runtime.driverGetVersion() if machine.gpu else 0
    return {
        "gpu": machine.name if machine.gpu else None,
        "sm_count": machine.sm_count if machine.gpu else None,
        "driver": _driver_version(),
        "driver_cuda": f"{api // 1000}.{api % 1000 // 10}" if api else None,
        "nvrtc": ".".join(map(str, runtime_compile.nvrtc_version())),
        "cupy": cupy.__version__,
        "cuda_bindings": _version("cuda-bindings"),
        "python": platform.python_version(),
    }


def facts(machine: Machine) -> dict[str, Any]:
    """For people: versions, folders, and each environment variable: value, meaning, what is wrong with it or None."""
    from flashmla_cupy.runtime import cache, env, source

    problems, cuda_src, store = env.problems(), None, cache.CacheInfo(None, 0, 0, False)
    if env.CUDA_SRC.name not in problems:
        try:
            cuda_src = str(source.source_root())
        except FileNotFoundError as error:
            problems[env.CUDA_SRC.name] = str(error)
    if env.CACHE_DIR.name not in problems:
        store = cache.info()
    if env.DUMP_DIR.name not in problems and env.dump_dir() is not None and not env.can_write(env.dump_dir()):
        problems[env.DUMP_DIR.name] = f"{env.DUMP_DIR.name}: {env.dump_dir()} cannot be written"
    return {
        "flashmla_cupy": flashmla_cupy.__version__,
        **versions(machine),
        "ml_dtypes": _version("ml_dtypes"),
        "numpy": _version("numpy"),
        "torch": _version("torch"),
        "cuda_src": cuda_src,
        "cache": str(store.directory) if store.directory else None,
        "cache_entries": store.entries,
        "cache_writable": store.writable,
        "variables": {
            variable.name: {"value": env.raw(variable), "meaning": variable.meaning,
                            "problem": problems.get(variable.name)}
            for variable in env.VARIABLES
        },
    }


def _version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _driver_version() -> str | None:
    """The kernel driver's version, such as 580.159.04, where Linux shows it."""
    try:
        found = re.search(r"\b(\d+\.\d+(?:\.\d+)?)\b", _DRIVER_FILE.read_text(encoding="utf-8"))
    except OSError:
        return None
    return found[1] if found else None
