"""TMA descriptors (CUtensorMap) for tiled loads and stores."""

from __future__ import annotations

import ctypes
import functools

import numpy as np

from . import driver

_TYPES = {  # dtype name -> (CUtensorMapDataType suffix, bytes of an element)
    "bfloat16": ("BFLOAT16", 2),
    "float16": ("FLOAT16", 2),
    "float32": ("FLOAT32", 4),
    "uint8": ("UINT8", 1),
}
BYTES = 128


def encode(
    ptr: int,
    dtype_name: str,
    shape: tuple[int, ...],
    strides_bytes: tuple[int, ...],
    box: tuple[int, ...],
    *,
    swizzle_bytes: int = 128,
    l2_promotion: int = 128,
) -> np.ndarray:
    """Descriptor of a tiled view of device memory, (128,) uint8, read-only and cached.

    `shape` and `box` count elements, innermost dimension first; `strides_bytes` is for dimensions 1 and up (the
    innermost is dense). Elements out of bounds read as zero and are not written. Raises ValueError with what the
    driver would refuse, so that the message says which argument.
    """
    return _encode(ptr, dtype_name, tuple(shape), tuple(strides_bytes), tuple(box), swizzle_bytes, l2_promotion)


@functools.lru_cache(maxsize=512)
def _encode(ptr, dtype_name, shape, strides_bytes, box, swizzle_bytes, l2_promotion) -> np.ndarray:
    _check(ptr, dtype_name, shape, strides_bytes, box, swizzle_bytes, l2_promotion)
    cu, rank = driver.cu(), len(shape)
    swizzle = f"{swizzle_bytes}B" if swizzle_bytes else "NONE"
    promotion = f"L2_{l2_promotion}B" if l2_promotion else "NONE"
    # Through ctypes: the driver wants a destination aligned to 64 bytes, which cuda-bindings' CUtensorMap is not.
    memory = np.zeros(2 * BYTES, np.uint8)
    start = -memory.ctypes.data % BYTES
    tensor_map = memory[start : start + BYTES]
    result = driver.entry_point("cuTensorMapEncodeTiled")(
        ctypes.c_void_p(tensor_map.ctypes.data),
        int(getattr(cu.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{_TYPES[dtype_name][0]}")),
        ctypes.c_uint32(rank),
        ctypes.c_void_p(ptr),
        (ctypes.c_uint64 * rank)(*shape),
        (ctypes.c_uint64 * rank)(*strides_bytes),
        (ctypes.c_uint32 * rank)(*box),
        (ctypes.c_uint32 * rank)(*[1] * rank),
        int(cu.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE),
        int(getattr(cu.CUtensorMapSwizzle, f"CU_TENSOR_MAP_SWIZZLE_{swizzle}")),
        int(getattr(cu.CUtensorMapL2promotion, f"CU_TENSOR_MAP_L2_PROMOTION_{promotion}")),
        int(cu.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE),
    )
    if result:
        doing = f"tensor map of {dtype_name}{list(shape)}, strides {list(strides_bytes)}, box {list(box)}"
        driver.check(cu.CUresult(result), doing)
    tensor_map.flags.writeable = False
    return tensor_map


def _check(ptr, dtype_name, shape, strides_bytes, box, swizzle_bytes, l2_promotion) -> None:
    def require(condition: bool, argument: str, got: object, expected: str) -> None:
        if not condition:
            raise ValueError(f"{argument}: got {got}, expected {expected}")

    require(dtype_name in _TYPES, "dtype_name", repr(dtype_name), "one of " + ", ".join(_TYPES))
    rank, element_bytes = len(shape), _TYPES[dtype_name][1]
    require(1 <= rank <= 5, "shape", shape, "1 to 5 dimensions")
    require(all(0 < extent <= 1 << 32 for extent in shape), "shape", shape, "extents in [1, 2^32]")
    require(ptr % 16 == 0, "ptr", hex(ptr), "a multiple of 16 bytes")
    require(len(strides_bytes) == rank - 1, "strides_bytes", strides_bytes, f"{rank - 1} values (dimensions 1 and up)")
    strides_fit = all(0 <= stride < 1 << 40 and stride % 16 == 0 for stride in strides_bytes)
    require(strides_fit, "strides_bytes", strides_bytes, "multiples of 16 below 2^40")
    require(len(box) == rank and all(1 <= extent <= 256 for extent in box), "box", box, f"{rank} extents in [1, 256]")
    require(swizzle_bytes in (0, 32, 64, 128), "swizzle_bytes", swizzle_bytes, "0, 32, 64 or 128")
    require(l2_promotion in (0, 64, 128, 256), "l2_promotion", l2_promotion, "0, 64, 128 or 256")
    row_bytes = box[0] * element_bytes
    require(row_bytes % 16 == 0, "box", box, "an innermost extent of a multiple of 16 bytes")
    fits = not swizzle_bytes or row_bytes <= swizzle_bytes
    require(fits, "box", box, f"an innermost extent of at most {swizzle_bytes} bytes (the swizzle span)")
