"""The eight environment variables. Only this module reads them, at each call, so that tests can change them."""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from pathlib import Path

_TRUE, _FALSE = {"1", "true", "yes", "on"}, {"", "0", "false", "no", "off"}
_LEVELS = ("debug", "info", "warning", "error")


@dataclass(frozen=True)
class Variable:
    name: str
    meaning: str
    affects_code: bool = False  # part of the cache key


CUDA_SRC = Variable("FLASHMLA_CUDA_SRC", "folder of CUDA sources to use instead of the shipped cuda_src", True)
CACHE_DIR = Variable("FLASHMLA_CACHE_DIR", "folder of compiled kernels (default: $XDG_CACHE_HOME/flashmla_cupy)")
LOG = Variable("FLASHMLA_LOG", "log level on stderr: " + ", ".join(_LEVELS))
DUMP_DIR = Variable("FLASHMLA_DUMP_DIR", "folder that gets the generated source, cubin and compile log of each kernel")
LINEINFO = Variable("FLASHMLA_LINEINFO", "1: compile with line information for profilers and sanitizers", True)
DEVICE_ASSERT = Variable("FLASHMLA_DEVICE_ASSERT", "1: compile device-side assertions in", True)
FORCE_PORTABLE = Variable("FLASHMLA_FORCE_PORTABLE", "1: select the portable kernels on every GPU", True)
DISABLE_PDL = Variable("FLASHMLA_DISABLE_PDL", "1: launch without programmatic dependent launch")
VARIABLES = (CUDA_SRC, CACHE_DIR, LOG, DUMP_DIR, LINEINFO, DEVICE_ASSERT, FORCE_PORTABLE, DISABLE_PDL)


def raw(variable: Variable) -> str | None:
    """The variable's text; None when unset or empty."""
    return os.environ.get(variable.name) or None


def _flag(variable: Variable) -> bool:
    text = (raw(variable) or "").strip().lower()
    if text not in _TRUE | _FALSE:
        raise ValueError(f"{variable.name}: got {text!r}, expected 0 or 1")
    return text in _TRUE


def _folder(variable: Variable) -> Path | None:
    text = raw(variable)
    return Path(text).expanduser().absolute() if text else None


def cuda_src() -> Path | None:
    return _folder(CUDA_SRC)


def cache_dir() -> Path | None:
    """Where compiled kernels go; None when there is no home directory to put them in."""
    folder = _folder(CACHE_DIR)
    if folder is not None:
        return folder
    xdg = os.environ.get("XDG_CACHE_HOME")
    if xdg and os.path.isabs(xdg):
        return Path(xdg) / "flashmla_cupy"
    home = os.path.expanduser("~")
    return Path(home) / ".cache" / "flashmla_cupy" if os.path.isabs(home) else None


def dump_dir() -> Path | None:
    return _folder(DUMP_DIR)


def lineinfo() -> bool:
    return _flag(LINEINFO)


def device_assert() -> bool:
    return _flag(DEVICE_ASSERT)


def force_portable() -> bool:
    return _flag(FORCE_PORTABLE)


def pdl_enabled() -> bool:
    return not _flag(DISABLE_PDL)


def logger() -> logging.Logger:
    """The library's logger; FLASHMLA_LOG gives it a level and a stderr handler, else the application decides."""
    log = logging.getLogger("flashmla_cupy")
    level = raw(LOG)
    if level is not None:
        if level.lower() not in _LEVELS:
            raise ValueError(f"{LOG.name}: got {level!r}, expected one of {', '.join(_LEVELS)}")
        log.setLevel(level.upper())
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("flashmla_cupy %(levelname)s: %(message)s"))
            log.addHandler(handler)
    return log
