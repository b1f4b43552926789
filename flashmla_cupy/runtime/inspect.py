"""What a compiled kernel is made of: resources from the ptxas log, symbols of the cubin, SASS and PTX text."""

from __future__ import annotations

import os
import re
import shutil
import struct
import subprocess
import tempfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from ..errors import FlashMLAError

RECORD_SYMBOL = "flashmla_record"


@dataclass(frozen=True)
class Record:
    """The kernel's own statement of its launch, from the constant `flashmla_record` in the cubin."""

    threads: int
    cluster: int  # blocks along x
    smem_bytes: int  # dynamic shared memory
    params_bytes: int


@dataclass(frozen=True)
class Resources:
    """What ptxas reports for one kernel."""

    registers: int
    barriers: int
    stack_bytes: int  # local memory of the stack frame
    spill_store_bytes: int
    spill_load_bytes: int
    static_smem_bytes: int

    @property
    def spill_bytes(self) -> int:
        return self.spill_store_bytes + self.spill_load_bytes


def resources(log: str) -> Resources:
    """Parse `--ptxas-options=-v` output. A unit has one kernel; non-inlined functions add to the frame and spills."""

    def total(pattern: str) -> int:
        return sum(int(value) for value in re.findall(pattern, log))

    return Resources(
        registers=max((int(v) for v in re.findall(r"Used (\d+) registers", log)), default=0),
        barriers=total(r"used (\d+) barriers"),
        stack_bytes=total(r"(\d+) bytes stack frame"),
        spill_store_bytes=total(r"(\d+) bytes spill stores"),
        spill_load_bytes=total(r"(\d+) bytes spill loads"),
        static_smem_bytes=total(r"(\d+) bytes smem"),
    )


def complete_elf(cubin: bytes) -> bytes:
    """The cubin with the last byte that CuPy's getCUBIN drops (it takes it for a string's NUL): it ends a header table,
    and tools refuse the file without it."""
    if len(cubin) < 64:
        return cubin
    program_headers, section_headers = struct.unpack_from("<QQ", cubin, 32)
    program_size, programs, section_size, sections = struct.unpack_from("<4H", cubin, 54)
    end = max(program_headers + program_size * programs, section_headers + section_size * sections)
    return cubin + b"\0" if len(cubin) == end - 1 else cubin


def symbol_bytes(cubin: bytes, name: str) -> bytes:
    """Initial content of data symbol `name` in a cubin (little-endian ELF64). Raises ValueError when not there."""
    if len(cubin) < 64 or cubin[:6] != b"\x7fELF\x02\x01":
        raise ValueError("cubin: got no little-endian ELF64 file")
    table, entry_size, count = struct.unpack_from("<Q", cubin, 40)[0], *struct.unpack_from("<HH", cubin, 58)
    # Per section: type, address, file offset, size, link (for a symbol table: its string table).
    sections = []
    for i in range(count):
        _, kind, _, address, offset, size, link = struct.unpack_from("<IIQQQQI", cubin, table + i * entry_size)
        sections.append((kind, address, offset, size, link))
    for kind, _, offset, size, link in sections:
        if kind != 2:  # SHT_SYMTAB
            continue
        strings = sections[link][2]
        for position in range(offset, offset + size, 24):
            name_at, _, _, section, value, length = struct.unpack_from("<IBBHQQ", cubin, position)
            start = strings + name_at
            if cubin[start : cubin.index(b"\0", start)] != name.encode() or not 0 < section < count:
                continue
            home_kind, home_address, home_offset, _, _ = sections[section]
            if home_kind == 8:  # SHT_NOBITS
                return bytes(length)
            at = home_offset + value - home_address
            return cubin[at : at + length]
    raise ValueError(f"cubin: no symbol {name}")


def record(cubin: bytes) -> Record:
    """The launch record of a cubin made from a generated unit."""
    return Record(*struct.unpack("<4i", symbol_bytes(cubin, RECORD_SYMBOL)))


def find_tool(name: str) -> str | None:
    """Path of a CUDA binary utility: on PATH, in CUDA_HOME/CUDA_PATH, the default toolkit, or inside triton."""
    folders = [Path(root) / "bin" for root in (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH")) if root]
    folders.append(Path("/usr/local/cuda/bin"))
    triton = find_spec("triton")
    if triton is not None and triton.submodule_search_locations:
        folders.append(Path(triton.submodule_search_locations[0]) / "backends/nvidia/bin")
    return shutil.which(name) or shutil.which(name, path=os.pathsep.join(map(str, folders)))


def sass(cubin: bytes) -> str:
    """Disassembly. Raises FlashMLAError when no disassembler is installed or it fails."""
    tool = find_tool("nvdisasm")
    arguments = ["-hex"] if tool else ["--dump-sass"]
    tool = tool or find_tool("cuobjdump")
    if tool is None:
        raise FlashMLAError("sass: neither nvdisasm nor cuobjdump found (pip install triton brings them)")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        result = subprocess.run([tool, *arguments, file.name], capture_output=True, text=True)
    if result.returncode:
        raise FlashMLAError(f"sass: {tool} failed: {result.stderr.strip()}")
    return result.stdout
