"""The `flashmla-cupy` command, also `python -m flashmla_cupy`: runs cli.py, which a wheel carries as _cli.py."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    if find_spec("flashmla_cupy._cli") is not None:
        names = runpy.run_module("flashmla_cupy._cli")
    else:
        path = Path(__file__).resolve().parents[1] / "cli.py"
        if not path.is_file():
            sys.exit(f"flashmla-cupy: neither the package nor {path.parent} holds the command line (cli.py)")
        names = runpy.run_path(str(path))
    names["cli"](prog_name="flashmla-cupy")


if __name__ == "__main__":
    main()
