"""What test modules import by name: the repository's root and the spec of the toy op that conftest.py writes."""

from __future__ import annotations

from pathlib import Path

from flashmla_cupy.runtime.spec import KernelSpec

REPO = Path(__file__).resolve().parents[1]
TOY = KernelSpec(op="toy", path="sm90", config=("float", "128"), tag=("f32", "n128"), params="CombineParams")
