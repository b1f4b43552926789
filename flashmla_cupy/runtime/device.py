"""Questions about the GPU. Only gpu_available() may be asked on a machine without one."""

from __future__ import annotations

import functools
from dataclasses import dataclass


@dataclass(frozen=True)
class DeviceInfo:
    name: str
    compute_capability: tuple[int, int]  # (9, 0)
    arch: str  # "sm_90a": with the architecture-specific features from Hopper on
    sm_count: int
    smem_optin_bytes: int  # dynamic shared memory that a block may ask for


def gpu_available() -> bool:
    """Whether CuPy can use a GPU here. Never raises; initialises the CUDA driver."""
    try:
        from cupy.cuda import runtime

        return runtime.getDeviceCount() > 0
    except Exception:  # no driver, a driver too old, no CuPy: all mean the same here
        return False


def info(device_id: int | None = None) -> DeviceInfo:
    """Facts of a device (None: CuPy's current one), cached. Raises CuPy's CUDARuntimeError without a GPU."""
    if device_id is None:
        from cupy.cuda import runtime

        device_id = runtime.getDevice()
    return _info(device_id)


@functools.cache
def _info(device_id: int) -> DeviceInfo:
    from cupy.cuda import runtime

    properties = runtime.getDeviceProperties(device_id)
    major, minor = properties["major"], properties["minor"]
    return DeviceInfo(
        name=properties["name"].decode(),
        compute_capability=(major, minor),
        arch=f"sm_{major}{minor}{'a' if major >= 9 else ''}",
        sm_count=properties["multiProcessorCount"],
        smem_optin_bytes=properties["sharedMemPerBlockOptin"],
    )


def is_capturing(stream_ptr: int) -> bool:
    """Whether work on the stream goes into a CUDA graph, or is forbidden because another stream's does."""
    from cupy.cuda import runtime

    try:
        return bool(runtime.streamIsCapturing(stream_ptr))
    except runtime.CUDARuntimeError as error:
        if error.status == _STREAM_CAPTURE_IMPLICIT:
            return True
        raise


_STREAM_CAPTURE_IMPLICIT = 906  # cudaErrorStreamCaptureImplicit: the legacy stream was asked during a capture
