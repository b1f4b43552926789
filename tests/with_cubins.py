"""Kernels compiled by the NVRTC of one machine, run on another that has the GPU.

    python tests/with_cubins.py build FOLDER             where the NVRTC is; needs no GPU
    python tests/with_cubins.py run FOLDER validate ...  where the GPU is: cli.py, with FOLDER's cubins for NVRTC's

NVRTC 12.9 and 13.0 do not always make the same of a kernel, and users have either; so a record of each is kept.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
_INDEX = "index.json"


def build(folder: Path, pattern: str = "") -> list[str]:
    """Compile every selectable kernel whose name contains `pattern`; returns their names."""
    from flashmla_cupy.ops import _select
    from flashmla_cupy.runtime import compile as kernel_compile
    from flashmla_cupy.runtime import source

    folder.mkdir(parents=True, exist_ok=True)
    digests = {}
    for spec in _select.all_specs():
        if pattern in spec.name and not spec.experimental:
            compiled = kernel_compile.compile_cubin(spec)
            (folder / f"{spec.name}.cubin").write_bytes(compiled.cubin)
            (folder / f"{spec.name}.log").write_text(compiled.log, encoding="utf-8")
            digests[spec.name] = source.digest(spec)
    index = {"nvrtc": kernel_compile.nvrtc_version(), "digests": digests}
    (folder / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    return list(digests)


def use(folder: Path, patch=setattr) -> None:
    """From now on this process takes `folder` for its NVRTC. patch(object, name, value) does it."""
    from flashmla_cupy.errors import KernelCompileError
    from flashmla_cupy.runtime import compile as kernel_compile
    from flashmla_cupy.runtime import source

    index = json.loads((folder / _INDEX).read_text(encoding="utf-8"))

    def built(spec, unit, flags, result="getCUBIN"):
        if result != "getCUBIN" or index["digests"].get(spec.name) != source.digest(spec):
            raise KernelCompileError(f"{spec.name}: {folder} has no {result[3:]} of its present source")
        log = (folder / f"{spec.name}.log").read_text(encoding="utf-8")
        return (folder / f"{spec.name}.cubin").read_bytes(), log

    patch(kernel_compile, "_run_nvrtc", built)
    patch(kernel_compile, "nvrtc_version", lambda: tuple(index["nvrtc"]))


def main() -> None:
    match sys.argv[1:]:
        case ["build", folder]:
            print(f"{len(build(Path(folder)))} kernels")
        case ["run", folder, *arguments]:
            from cli import cli

            use(Path(folder))
            cli(arguments)
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    sys.path.insert(0, str(REPO))
    main()
