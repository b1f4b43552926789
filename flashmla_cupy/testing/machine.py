"""Where checks run: the current GPU through CuPy, or the NumPy backend on a machine without one."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np

from flashmla_cupy.errors import FlashMLAError

H200_SM_COUNT = 132  # assumed where there is no GPU to ask


class HangError(FlashMLAError):
    """A kernel did not return in time. The process cannot use this GPU any more."""


@dataclass(frozen=True)
class Machine:
    """xp: the array namespace of the checks. gpu: whether xp is CuPy on a real device."""

    xp: Any
    gpu: bool
    name: str
    sm_count: int = H200_SM_COUNT

    def wait(self, seconds: float = 30.0) -> None:
        """Until everything queued on the current stream is done. Raises HangError past `seconds`."""
        if not self.gpu:
            return
        event = self.xp.cuda.Event(disable_timing=True)
        event.record()
        deadline = time.monotonic() + seconds
        while not event.done:
            if time.monotonic() > deadline:
                raise HangError(f"a kernel did not finish within {seconds:g} s")
            time.sleep(2e-5)

    def free(self) -> None:
        """Hands cached device memory back."""
        if self.gpu:
            self.xp.get_default_memory_pool().free_all_blocks()

    def healthy(self) -> bool:
        """False once the GPU context is lost (an illegal access, say), after which every call fails."""
        if not self.gpu:
            return True
        try:
            self.xp.cuda.runtime.deviceSynchronize()
            return True
        except self.xp.cuda.runtime.CUDARuntimeError:
            return False


def detect(force_numpy: bool = False) -> Machine:
    """The current GPU if there is one, else NumPy."""
    if not force_numpy:
        from flashmla_cupy.runtime import device

        if device.gpu_available():
            import cupy

            info = device.info()
            return Machine(cupy, True, info.name, info.sm_count)
    return Machine(np, False, "NumPy backend, no GPU found")
