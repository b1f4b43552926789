"""The eight environment variables. Only this module reads them, at each call, so that tests can change them."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Callable
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
    if text is None:
        return None
    try:
        if text.partition("/")[0] == "~" and _home() is None:
            raise RuntimeError("there is no home directory")
        return Path(text).expanduser().absolute()
    except (RuntimeError, OSError) as error:  # "~nouser"; a relative path where the current folder is gone
        raise ValueError(f"{variable.name}: got {text!r}, expected a folder ({error})") from None


def _home() -> Path | None:
    """The home directory, if there is one. An empty HOME names none: expanduser would take the root for it."""
    text = "" if os.environ.get("HOME") == "" else os.path.expanduser("~")
    return Path(text) if os.path.isabs(text) else None


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
    home = _home()
    return home / ".cache" / "flashmla_cupy" if home else None


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


def _log_level() -> str | None:
    level = raw(LOG)
    if level is not None and level.lower() not in _LEVELS:
        raise ValueError(f"{LOG.name}: got {level!r}, expected one of {', '.join(_LEVELS)}")
    return level


def logger() -> logging.Logger:
    """The library's logger; FLASHMLA_LOG gives it a level and a stderr handler, else the application decides."""
    log = logging.getLogger("flashmla_cupy")
    level = _log_level()
    if level is not None:
        log.setLevel(level.upper())
        if not log.handlers:
            handler = logging.StreamHandler()
            handler.setFormatter(logging.Formatter("flashmla_cupy %(levelname)s: %(message)s"))
            log.addHandler(handler)
    return log


def warn_of_log_level() -> None:
    """For the import: a level that does not exist is an error where kernels are compiled, and elsewhere unnoticed."""
    try:
        _log_level()
    except ValueError as error:
        logging.getLogger("flashmla_cupy").warning(str(error))


_READERS: dict[Variable, Callable[[], object]] = {
    CUDA_SRC: cuda_src, CACHE_DIR: cache_dir, LOG: _log_level, DUMP_DIR: dump_dir, LINEINFO: lineinfo,
    DEVICE_ASSERT: device_assert, FORCE_PORTABLE: force_portable, DISABLE_PDL: pdl_enabled,
}


def problems() -> dict[str, str]:
    """What is wrong with the values, by the name of the variable; empty when all can be used."""
    found = {}
    for variable, read in _READERS.items():
        try:
            read()
        except ValueError as error:
            found[variable.name] = str(error)
    return found


def check() -> None:
    """Raises ValueError for the first variable whose value cannot be used, whether it matters now or only later."""
    for message in problems().values():
        raise ValueError(message)


def can_write(folder: Path | None) -> bool:
    """Whether files can be made in `folder`, or in its nearest parent that exists. Leaves nothing, never raises.

    Tried with a file that has no name: os.access allows root everything, also what is not possible, such as in /proc.
    """
    while folder is not None and not os.path.lexists(folder) and folder != folder.parent:
        folder = folder.parent
    try:
        if folder is not None:
            tempfile.TemporaryFile(dir=folder).close()
        return folder is not None
    except OSError:
        return False


def let_cupy_import() -> None:
    """Names a temporary folder for CuPy's own kernels where it cannot make its usual one.

    `import cupy` makes CUPY_CACHE_DIR, default ~/.cupy/kernel_cache, and fails where there is no writable home. This
    leaves no file, and changes nothing where that folder can be made or CuPy is imported already.
    """
    if "cupy" in sys.modules:
        return
    home = _home()
    text = os.environ.get("CUPY_CACHE_DIR", str(home / ".cupy" / "kernel_cache") if home else "")
    try:
        if text and not text.startswith("~") and can_write(Path(text).absolute()):
            return
        folder = os.path.join(tempfile.gettempdir(), f"flashmla_cupy-{secrets.token_hex(8)}")
    except OSError:  # no current folder, or nothing can be written anywhere: CuPy says so itself
        return
    os.environ["CUPY_CACHE_DIR"] = folder
    maker = os.getpid()

    def remove() -> None:  # not in a forked child, whose parent still uses it
        if os.getpid() == maker:
            shutil.rmtree(folder, ignore_errors=True)

    atexit.register(remove)
