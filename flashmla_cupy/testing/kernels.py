"""Looking into the kernel variants: choose by name, compile, dump, watch (no GPU needed)."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flashmla_cupy.errors import FlashMLAError, KernelCompileError
from flashmla_cupy.ops import _select
from flashmla_cupy.runtime import compile as runtime_compile
from flashmla_cupy.runtime import inspect, source
from flashmla_cupy.runtime.spec import KernelSpec

WHY = {  # op -> why its variants are chosen at compile time
    "dense_decode": "element type (bf16, fp16: other wgmma instructions) x d_qk (the first product's depth, unrolled)",
    "combine": "element types x rows and columns of a warp (registers); splits, heads and rows are run-time arguments",
    "sched_meta": "one variant: lengths, parts and topk are run-time arguments",
    "sparse_decode": "cache layout (offsets, unrolled) x keys by list, or pages x codes as they are (e4m3), few rows, "
                     "or keys as bf16, those also with the crossover (cluster of 2)",
    "sparse_prefill": "d_qk (the first product's depth, unrolled)",
    "kv_quant": "direction x layout (offsets and tiles, unrolled) x element type of the other side",
}

Compiled = tuple[str, Any]  # kernel name, CompiledKernel or the error


def choose(name: str = "", ops: tuple[str, ...] = ()) -> list[KernelSpec]:
    """Specs whose name contains `name`, of `ops` if any are given. Raises ValueError when there is none."""
    specs = _select.all_specs()
    chosen = [spec for spec in specs if name in spec.name and (not ops or spec.op in ops)]
    if not chosen:
        raise ValueError(f"kernel: got {name!r}, expected part of one of {', '.join(spec.name for spec in specs)}")
    return chosen


def compile_all(
    specs: list[KernelSpec],
    *,
    use_cache: bool = True,
    arch: str | None = None,
    on_done: Callable[[str], None] = lambda name: None,
) -> list[Compiled]:
    """Compiles one after the other, so that the seconds of each mean something. arch: instead of each spec's own."""
    rows: list[Compiled] = []
    for spec in specs:
        try:
            if arch is not None:
                _check_arch(spec, arch)
            rows.append((spec.name, runtime_compile.compile_cubin(spec, arch, use_cache=use_cache)))
        except FlashMLAError as error:
            rows.append((spec.name, error))
        on_done(spec.name)
    return rows


def _check_arch(spec: KernelSpec, arch: str) -> None:
    """Raises FlashMLAError where the kernel uses instructions that `arch` (sm_90a, say) does not have."""
    lowest, given = (int(re.search("sm_?([0-9]+)", name)[1]) for name in (spec.path, arch))
    if lowest == 90 and arch != "sm_90a":  # wgmma, which only Hopper has
        raise FlashMLAError(f"{spec.name}: needs sm_90a, not {arch}")
    if given < lowest:
        raise FlashMLAError(f"{spec.name}: needs sm_{lowest} or higher, not {arch}")


def errors(rows: list[Compiled]) -> list[Exception]:
    return [item for _, item in rows if isinstance(item, Exception)]


def dump(spec: KernelSpec, folder: Path) -> tuple[list[str], str | None]:
    """Writes the generated unit, cubin, compile log, PTX and SASS of a kernel.

    Returns the file names, and why there is no SASS when no disassembler is installed. Of a kernel that does not
    compile the unit and the log are there when KernelCompileError is raised.
    """
    folder.mkdir(exist_ok=True)
    try:
        compiled = runtime_compile.compile_cubin(spec)
    except KernelCompileError as error:
        (folder / f"{spec.name}.log").write_text(error.log or str(error), encoding="utf-8")
        with contextlib.suppress(OSError, UnicodeError):  # a source that cannot be read, which the log says
            (folder / f"{spec.name}.cu").write_text(source.generate(spec), encoding="utf-8")
        raise
    contents = {"cu": source.generate(spec), "log": compiled.log, "ptx": runtime_compile.ptx(spec)}
    missing = None
    try:
        contents["sass"] = inspect.sass(compiled.cubin)
    except FlashMLAError as error:
        missing = str(error)
    for suffix, text in contents.items():
        (folder / f"{spec.name}.{suffix}").write_text(text, encoding="utf-8")
    (folder / f"{spec.name}.cubin").write_bytes(compiled.cubin)
    return [f"{spec.name}.{suffix}" for suffix in ("cubin", *contents)], missing


def changes(specs: list[KernelSpec], interval: float, rounds: int | None = None) -> Iterator[list[KernelSpec]]:
    """Looks at the sources every `interval` seconds and yields the kernels that changed: all of them at first.

    A kernel whose sources cannot be read is yielded once for each reason; compiling it says what is wrong.
    """
    seen: dict[KernelSpec, str] = {}
    gone: dict[KernelSpec, int] = {}  # looks in a row at which a file was missing
    look = 0
    while rounds is None or look < rounds:
        look += 1
        changed = []
        for spec in specs:
            try:
                digest = source.digest(spec)
                gone[spec] = 0
            except FileNotFoundError as error:
                gone[spec] = gone.get(spec, 0) + 1
                digest = str(error) if gone[spec] > 1 else seen.get(spec, "")  # once: an editor replacing a file
            except (OSError, UnicodeError) as error:
                digest = str(error)
            if seen.get(spec, "") != digest:
                changed.append(spec)
            seen[spec] = digest
        if changed:
            yield changed
        time.sleep(interval)
