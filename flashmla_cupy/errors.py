"""Errors that flashmla_cupy raises besides ValueError (wrong value) and TypeError (wrong type or dtype)."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["FlashMLAError", "KernelCompileError", "CaptureError", "UnsupportedError"]


class FlashMLAError(Exception):
    """Base of the library's own errors; raised itself when the CUDA driver refuses a call."""


class KernelCompileError(FlashMLAError):
    """A kernel did not compile. The message is the first error with its place in cuda_src; `log` has the rest."""

    def __init__(self, message: str, log: str = "") -> None:
        super().__init__(message)
        self.log = log

    def __reduce__(self):
        return type(self), (self.args[0], self.log)


class CaptureError(FlashMLAError):
    """A kernel had to be compiled or loaded while its stream was being captured into a CUDA graph."""


class UnsupportedError(FlashMLAError, NotImplementedError):
    """No kernel serves this problem on this device: `reasons` says why, `way_out` what would work."""

    def __init__(self, what: str, reasons: Sequence[str] = (), way_out: str = "") -> None:
        self.what, self.reasons, self.way_out = what, tuple(reasons), way_out
        message = what
        if self.reasons:
            message += ": " + "; ".join(self.reasons)
        if way_out:
            message += f" ({way_out})"
        super().__init__(message)

    def __reduce__(self):
        return type(self), (self.what, self.reasons, self.way_out)
