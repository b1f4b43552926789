"""The `flashmla-cupy` command, also `python -m flashmla_cupy`: runs cli.py, which a wheel carries as _cli.py."""

from __future__ import annotations

import runpy
import sys
from importlib.util import find_spec
from pathlib import Path


def main() -> None:
    if find_spec("flashmla_cupy._cli") is not None:
        runpy.run_module("flashmla_cupy._cli", run_name="__main__")
        return
    cli = Path(__file__).resolve().parents[1] / "cli.py"
    if not cli.is_file():
        sys.exit(f"flashmla-cupy: neither the package nor {cli.parent} holds the command line (cli.py)")
    runpy.run_path(str(cli), run_name="__main__")


if __name__ == "__main__":
    main()
