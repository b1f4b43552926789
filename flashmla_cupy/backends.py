"""Which arrays a call was given: CuPy arrays, NumPy arrays, or another library's, reached without a copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

__all__ = ["Backend", "backend_of", "describe", "as_device", "as_host", "as_integers", "host_arguments"]

Backend = Literal["cupy", "numpy"]

_TORCH_WAY_OUT = " (flashmla_cupy.torch takes torch's bfloat16 on the host)"
_DLPACK_CPU, _DLPACK_DEVICE = 1, (2, 13)  # kDLCPU; kDLCUDA and kDLCUDAManaged


def describe(x: Any) -> str:
    """A short name of any argument for error messages: "NumPy float32 array of shape (2, 3)"."""
    if x is None or isinstance(x, (bool, int, float, str)):
        return repr(x)
    kind = {"numpy": "NumPy", "cupy": "CuPy"}.get(type(x).__module__.partition(".")[0], _type_name(x))
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"{kind} {x.dtype} array of shape {tuple(x.shape)}"
    return f"an object of type {_type_name(x)}"


def backend_of(name: str, x: Any) -> Backend:
    """Where array `x` lives: "cupy" for any GPU array, "numpy" for NumPy and other host arrays. Makes no CUDA call.

    Raises TypeError when `x` (the argument called `name`) is no array at all.
    """
    if isinstance(x, (np.ndarray, np.generic)):
        return "numpy"
    if _is_cupy(x):
        return "cupy"
    if hasattr(x, "__dlpack_device__"):
        try:
            device_type = int(x.__dlpack_device__()[0])
        except Exception as error:  # torch's meta tensors, for one, have no memory
            raise TypeError(f"{name}: got {describe(x)} that does not say where it is ({error}), expected a CUDA or "
                            "host array") from error
        if device_type in _DLPACK_DEVICE:
            return "cupy"
        if device_type == _DLPACK_CPU:
            return "numpy"
        raise TypeError(f"{name}: got {describe(x)} on DLPack device type {device_type}, expected a CUDA or host array")
    if hasattr(x, "__cuda_array_interface__"):
        return "cupy"
    raise TypeError(f"{name}: got {describe(x)}, expected an array (CuPy, NumPy, or one with __dlpack__)")


def as_device(name: str, x: Any):
    """`x` as a CuPy array of the same memory; raises TypeError for host arrays and what cannot be shared.

    Another library's array is taken through DLPack, which orders CuPy's current stream of the array's device after the
    stream that library works on, or else through __cuda_array_interface__.
    """
    import cupy

    if type(x) is cupy.ndarray:
        return x
    if isinstance(x, cupy.ndarray):  # a subclass
        return cupy.ndarray(x.shape, x.dtype, x.data, x.strides)
    if backend_of(name, x) == "numpy":
        raise TypeError(f"{name}: got {describe(x)}, expected an array on the GPU like q")
    _refuse_more_than_memory(name, x)
    failures = []
    if hasattr(x, "__dlpack__"):
        try:
            return cupy.from_dlpack(x)
        except Exception as error:  # each library has its own exception types here
            failures.append(error)
    try:
        _ = x.__cuda_array_interface__  # cupy.asarray would copy an object that has none
        return cupy.asarray(x)
    except Exception as error:
        failures.append(error)
    raise TypeError(f"{name}: got {describe(x)} that cannot be shared ({failures[0]}), expected a CUDA array that "
                    "supports DLPack or __cuda_array_interface__") from failures[0]


def _refuse_more_than_memory(name: str, x: Any) -> None:
    """Raises TypeError for a torch tensor that is more than what lies in its memory, which is all that is shared."""
    for bit in ("neg", "conj"):
        if getattr(x, f"is_{bit}", bool)():
            raise TypeError(f"{name}: got a tensor whose {bit} bit is set, expected the result of its resolve_{bit}()")
    if getattr(x, "requires_grad", False) is True:
        raise TypeError(f"{name}: got a tensor that requires a gradient, expected the result of its detach(), as there "
                        "are no gradients")
    layout = str(getattr(x, "layout", ""))
    if layout.startswith("torch.") and layout != "torch.strided":
        raise TypeError(f"{name}: got a tensor of layout {layout}, expected the result of its to_dense()")


def as_host(name: str, x: Any, way_out: str = "") -> np.ndarray:
    """`x` as a NumPy array of the same memory; raises TypeError for GPU arrays and what NumPy cannot represent.

    way_out: what the message of the latter ends with.
    """
    if isinstance(x, np.ndarray):
        return refuse_masked(name, x)
    if backend_of(name, x) == "cupy":
        raise TypeError(f"{name}: got {describe(x)}, expected an array on the host like q")
    _refuse_more_than_memory(name, x)
    try:
        return np.asarray(x) if hasattr(x, "__array__") else np.from_dlpack(x)
    except Exception as error:  # each library has its own exception types here
        raise TypeError(f"{name}: got {describe(x)} that NumPy cannot hold ({error}), expected a NumPy array{way_out}"
                        ) from error


def refuse_masked(name: str, x: np.ndarray) -> np.ndarray:
    """`x`, unless it is a masked array (TypeError): its mask would be lost without a word."""
    if isinstance(x, np.ma.MaskedArray):
        raise TypeError(f"{name}: got a masked array, expected a plain NumPy array (x.filled(value) gives one)")
    return x


def as_integers(name: str, x: Any):
    """Lengths, tables, metadata: a CuPy or NumPy integer array as it is, a list or tuple as NumPy int32.

    Raises TypeError for other types and for values that are no integers, ValueError for host values beyond int32; but
    indices that int32 does not hold name nothing, and become ones that are skipped.
    """
    if isinstance(x, (list, tuple)):
        try:
            x = np.asarray(x)
        except ValueError as error:
            raise ValueError(f"{name}: got rows of different lengths, expected a rectangular array") from error
        if x.size == 0:
            x = x.astype(np.int32)
    elif isinstance(x, np.ndarray):
        refuse_masked(name, x)
    else:
        x = as_device(name, x) if backend_of(name, x) == "cupy" else as_host(name, x)
    if x.dtype.kind not in "iu":
        raise TypeError(f"{name}: got dtype {x.dtype}, expected int32 (or another integer type)")
    if isinstance(x, np.ndarray) and x.dtype != np.int32:
        if name in ("indices", "extra_indices"):
            return np.clip(x.astype(np.int64), -1, 2**31 - 1).astype(np.int32)
        if x.size and (x.max() > 2**31 - 1 or x.min() < -(2**31)):
            raise ValueError(f"{name}: got values from {x.min()} to {x.max()}, expected values that int32 holds")
        x = x.astype(np.int32)
    return x


def host_arguments(arrays: dict[str, Any], integers: Sequence[str], outputs: Sequence[str],
                   required: Sequence[str] = ("q", "k_cache")) -> dict[str, np.ndarray | None]:
    """The arrays of a flash_mla_with_kvcache call on the host, by argument name, as NumPy arrays of the same memory.

    integers: names that as_integers takes; outputs: names that must be NumPy arrays already. None stays None but for
    the required names.
    """
    host = {}
    for name, x in arrays.items():
        if x is None and name not in required:
            host[name] = None
        elif name in outputs:
            if not isinstance(x, np.ndarray):
                raise TypeError(f"{name}: got {describe(x)}, expected a NumPy array, as q is on the host")
            host[name] = refuse_masked(name, x)
        else:
            x = as_integers(name, x) if name in integers else x
            host[name] = as_host(name, x, _TORCH_WAY_OUT if str(getattr(x, "dtype", "")) == "torch.bfloat16" else "")
    return host


def _is_cupy(x: Any) -> bool:
    return type(x).__module__.partition(".")[0] == "cupy" and hasattr(x, "data")


def _type_name(x: Any) -> str:
    module = type(x).__module__
    return type(x).__qualname__ if module == "builtins" else f"{module}.{type(x).__qualname__}"
