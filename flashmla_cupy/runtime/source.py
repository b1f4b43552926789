"""Source assembly: where cuda_src is, which files a kernel includes, their digests, and the generated unit."""

from __future__ import annotations

import hashlib
import os
import re
from pathlib import Path

from . import env, params
from .spec import KernelSpec

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_COMMENT_OR_LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])\'', re.DOTALL)
_PARAMS_FILE = "common/params.cuh"


def source_root() -> Path:
    """The cuda_src folder: FLASHMLA_CUDA_SRC, else the one in the wheel, else the checkout's.

    Raises FileNotFoundError when none holds common/params.cuh.
    """
    package = Path(__file__).resolve().parents[1]
    override = env.cuda_src()
    candidates = [override] if override else [package / "_cuda_src", package.parent / "cuda_src"]
    for folder in candidates:
        if os.path.isfile(folder / _PARAMS_FILE):
            return folder
    name = env.CUDA_SRC.name if override else "cuda_src"
    raise FileNotFoundError(f"{name}: no {_PARAMS_FILE} in {' or '.join(map(str, candidates))}")


def _read_transitive(spec: KernelSpec) -> dict[str, str]:
    """Path below cuda_src -> text, of each file that the unit can include, sorted by path.

    The scan is lexical: an include under a false #if counts, and one that is missing is left to the compiler.
    """
    root, texts = source_root(), {}
    pending = [_PARAMS_FILE, spec.kernel_file]
    if not os.path.isfile(root / spec.kernel_file):
        raise FileNotFoundError(f"no {spec.kernel_file} in {root}")
    while pending:
        name = pending.pop()
        if name in texts:
            continue
        texts[name] = _read(root, name)
        for target in _INCLUDE.findall(texts[name]):
            sibling = Path(name).parent / target
            found = next((p for p in (sibling, Path(target)) if os.path.isfile(root / p)), None)
            if found is not None:
                pending.append(found.as_posix())
    return dict(sorted(texts.items()))


def _read(root: Path, name: str) -> str:
    """Raises OSError, and UnicodeError that names the file."""
    try:
        return (root / name).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UnicodeError(f"cuda_src/{name}: not UTF-8 text ({error})") from None


def _hash(texts: dict[str, str]) -> str:
    digest = hashlib.sha256()
    for name, text in texts.items():
        digest.update(f"{name}\0{len(text)}\0{text}".encode())
    return digest.hexdigest()


def strip_comments(text: str) -> str:
    """C++ text without comments, blank lines and trailing blanks; string and character literals stay."""
    code = _COMMENT_OR_LITERAL.sub(lambda m: m[0] if m[0][0] in "\"'" else " ", text)
    return "\n".join(line.rstrip() for line in code.splitlines() if line.strip())


def transitive_files(spec: KernelSpec) -> list[str]:
    """Sorted paths below cuda_src of each file the kernel includes, directly or not."""
    return list(_read_transitive(spec))


def digest(spec: KernelSpec) -> str:
    """SHA-256 of the transitive source, comments included: the cache's view of "the same code"."""
    return _hash(_read_transitive(spec))


def evidence_digest(spec: KernelSpec) -> str:
    """SHA-256 of the transitive source without comments: what a recorded test or measurement vouches for."""
    return _hash({name: strip_comments(text) for name, text in _read_transitive(spec).items()})


def generate(spec: KernelSpec) -> str:
    """The translation unit of `spec`: includes, layout asserts, the record that Python reads, and the entry."""
    config = f"Config<{', '.join(spec.config)}>" if spec.config else "Config"
    struct_name = f"flashmla::{spec.params}"
    return f"""\
// {spec.name} for {spec.arch}; transitive source {digest(spec)}
#include "{_PARAMS_FILE}"
#include "{spec.kernel_file}"
{params.static_asserts(spec.params)}
namespace flashmla {{ using UnitConfig = {spec.op}::{config}; }}
using flashmla::UnitConfig;
extern "C" __device__ __constant__ int flashmla_record[4] = {{
    UnitConfig::kThreads, UnitConfig::kClusterX, UnitConfig::kSmemBytes, (int)sizeof({struct_name})}};
extern "C" __global__ void __launch_bounds__(UnitConfig::kThreads, UnitConfig::kMinBlocks)
{spec.entry}(const __grid_constant__ {struct_name} params) {{
  flashmla::{spec.op}::kernel<UnitConfig>(params);
}}
"""
