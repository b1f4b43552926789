"""MLA attention kernels for CuPy, compiled at run time with NVRTC. Importing makes no CUDA call and writes no file."""

from __future__ import annotations

from importlib import import_module

from .runtime import env

__version__ = "0.1.0"

env.let_cupy_import()
env.warn_of_log_level()
del env

_EXPORTS = {  # public name -> module that defines it, imported at first use
    "get_mla_metadata": "flashmla_cupy.ops.sched_meta",
    "flash_mla_with_kvcache": "flashmla_cupy.ops.decode",
    "flash_mla_sparse_fwd": "flashmla_cupy.ops.sparse_prefill",
    "mla_workspace_bytes": "flashmla_cupy.ops.dense_decode",
    "merge_states": "flashmla_cupy.ops.combine",
    "quantize_kv_cache": "flashmla_cupy.ops.kv_quant",
    "dequantize_kv_cache": "flashmla_cupy.ops.kv_quant",
    "token_indices": "flashmla_cupy.ops.kv_quant",
    "FlashMLAError": "flashmla_cupy.errors",
    "KernelCompileError": "flashmla_cupy.errors",
    "CaptureError": "flashmla_cupy.errors",
    "UnsupportedError": "flashmla_cupy.errors",
}

__all__ = ["__version__", *_EXPORTS]


def __getattr__(name: str):
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
