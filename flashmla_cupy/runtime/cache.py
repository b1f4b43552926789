"""Disk cache of compiled kernels: one self-checking file an entry, published atomically, never trusted unread.

An entry is a first line with the SHA-256 of the rest, a line of JSON, then the cubin. A folder that cannot be written
(read-only, missing home, full disk) only costs the reuse: callers keep what they compiled in memory.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from . import env

_MAGIC = b"flashmla_cupy-kernel-1"
_SUFFIX = ".kernel"
_said: set[Path] = set()  # folders that cannot be written, of which the user was told


@dataclass(frozen=True)
class CacheInfo:
    directory: Path | None  # None: no home directory, memory only
    entries: int
    size_bytes: int
    writable: bool
    unreadable: int = 0  # entries that this user cannot read
    listable: bool = True  # False: the folder is there, and this user cannot look into it


def _path(name: str, key: str) -> Path | None:
    directory = env.cache_dir()
    return directory / f"{name}-{key}{_SUFFIX}" if directory else None


def load(name: str, key: str) -> tuple[dict, bytes] | None:
    """(JSON header, cubin) of an entry, or None. An entry whose checksum is wrong is removed."""
    path = _path(name, key)
    try:
        content = path.read_bytes() if path else None
    except OSError:
        return None
    if content is None:
        return None
    first, _, rest = content.partition(b"\n")
    header, _, cubin = rest.partition(b"\n")
    if first == _MAGIC + b" " + hashlib.sha256(rest).hexdigest().encode() and cubin:
        return json.loads(header), cubin
    env.logger().warning("cache: %s is damaged, rebuilding it", path)
    with contextlib.suppress(OSError):
        path.unlink()
    return None


def store(name: str, key: str, header: dict, cubin: bytes) -> bool:
    """Publish an entry; False when the folder cannot be written."""
    path = _path(name, key)
    if path is None:
        return False
    rest = json.dumps(header).encode() + b"\n" + cubin
    temporary = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _new_file(path.parent, name) as file:
            temporary = file.name
            file.write(_MAGIC + b" " + hashlib.sha256(rest).hexdigest().encode() + b"\n" + rest)
        os.replace(temporary, path)
        return True
    except OSError as error:
        _say_not_written(path, error)
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        return False


def _say_not_written(path: Path, error: OSError) -> None:
    """Aloud, once for each folder, where the user chose it: every process pays for it again."""
    if env.raw(env.CACHE_DIR) is None or path.parent in _said:
        env.logger().info("cache: %s not written (%s), kept in memory", path, error)
        return
    _said.add(path.parent)
    env.logger().warning("%s: got %s, which cannot be written (%s): kernels are compiled again in each process",
                         env.CACHE_DIR.name, path.parent, error)


def _new_file(folder: Path, name: str) -> BinaryIO:
    """A file of its own for this writer, with the permissions of the umask, so that a shared folder can be shared."""
    return open(folder / f".{name}-{secrets.token_hex(8)}.tmp", "xb")


@contextlib.contextmanager
def lock(name: str, key: str) -> Iterator[None]:
    """Holds an entry's lock, so that of many cold processes one compiles and the rest read. No lock on a bad folder."""
    path, file = _path(name, key), None
    try:
        import fcntl

        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            file = open(path.parent / f".{path.stem}.lock", "a")
            fcntl.flock(file, fcntl.LOCK_EX)  # ends with the process, however it ends
    except (ImportError, OSError) as error:
        env.logger().debug("cache: no lock (%s)", error)
    try:
        yield
    finally:
        if file is not None:
            file.close()


def _files() -> list[Path]:
    return [path for path in _listing() if path.suffix == _SUFFIX and not path.name.startswith(".")]


def _listing() -> list[Path]:
    """Every file of the folder, none where it cannot be listed. Folders in it are nobody's entries."""
    directory = env.cache_dir()
    try:
        with os.scandir(directory) if directory else contextlib.nullcontext(()) as found:
            return sorted(Path(entry.path) for entry in found if entry.is_file())
    except OSError:
        return []


def info() -> CacheInfo:
    directory, files = env.cache_dir(), _files()
    unreadable = sum(not os.access(file, os.R_OK) for file in files)
    listable = directory is None or not os.path.isdir(directory) or os.access(directory, os.R_OK | os.X_OK)
    size_bytes = 0
    for file in files:
        with contextlib.suppress(OSError):
            size_bytes += file.stat().st_size
    return CacheInfo(directory, len(files), size_bytes, env.can_write(directory), unreadable, listable)


def clear() -> int:
    """Remove every entry (and leftovers of killed processes); returns the number of entries removed.

    Raises OSError when an entry cannot be removed.
    """
    files = _files()
    for file in files:
        file.unlink(missing_ok=True)
    for file in _listing():
        if file.name.startswith(".") and file.suffix in (".lock", ".tmp"):
            file.unlink(missing_ok=True)
    return len(files)
