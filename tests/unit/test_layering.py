"""The dependency direction, read from imports and includes."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from flashmla_cupy.runtime import env
from tests.common import REPO

PACKAGE, CUDA_SRC = REPO / "flashmla_cupy", REPO / "cuda_src"
PYTHON_FILES = sorted(PACKAGE.rglob("*.py")) + [path for path in [REPO / "cli.py"] if path.exists()]
CUDA_FILES = sorted(CUDA_SRC.rglob("*.cuh"))

# Layer -> layers of flashmla_cupy that it may import (each also itself, and anything at the root that is listed here).
ANYONE = {"errors", "backends", "kv_format"}
MAY_IMPORT = {
    "cli": {"testing", "ops", "runtime", "reference"},
    "testing": {"ops", "runtime", "reference"},
    "torch": {"ops", "runtime"},
    "ops": {"runtime", "reference"},
    "runtime": set(),
    "reference": set(),
    "errors": set(),
    "backends": set(),
    "kv_format": set(),
}
LIBRARIES = {  # layer -> third-party modules that it must not import
    "reference": {"cupy", "cuda", "torch", "click", "rich"},
    "runtime": {"torch", "click", "rich", "matplotlib"},
    "ops": {"torch", "click", "rich", "matplotlib"},
}
CUDA_LAYERS = ["common", "ptx", "tile", "attention"]  # each may include those before it and itself; ops come after


def layer_of(path: Path) -> str:
    return path.stem if path.parent in (REPO, PACKAGE) else path.relative_to(PACKAGE).parts[0]


def imports(path: Path) -> set[str]:
    """Absolute dotted names that a file imports, also inside functions."""
    package = ("flashmla_cupy", *path.relative_to(PACKAGE).parts[:-1]) if PACKAGE in path.parents else ()
    names = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join((*base, *((node.module,) if node.module else ())))
            names |= {f"{module}.{alias.name}" for alias in node.names}
    return names


@pytest.mark.parametrize("path", PYTHON_FILES, ids=lambda path: str(path.relative_to(REPO)))
def test_python_imports(path):
    layer = layer_of(path)
    if layer in ("__init__", "__main__"):
        return
    assert layer in MAY_IMPORT, f"{layer}: give this layer its place in MAY_IMPORT"
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "flashmla_cupy" and len(parts) > 1:
            target = parts[1]
            is_layer = target in MAY_IMPORT or (PACKAGE / target).is_dir()
            allowed = not is_layer or target in MAY_IMPORT[layer] | ANYONE | {layer}
            assert allowed, f"{path.name} ({layer}) imports {name}"
        assert parts[0] not in LIBRARIES.get(layer, ()), f"{path.name} ({layer}) imports {name}"


@pytest.mark.parametrize("path", CUDA_FILES, ids=lambda path: str(path.relative_to(CUDA_SRC)))
def test_cuda_includes(path):
    layer = path.relative_to(CUDA_SRC).parts[0]
    below = CUDA_LAYERS[: CUDA_LAYERS.index(layer) + 1] if layer in CUDA_LAYERS else [*CUDA_LAYERS, layer]
    text = path.read_text(encoding="utf-8")
    for target in re.findall(r'^\s*#\s*include\s*"([^"]+)"', text, re.MULTILINE):
        assert (CUDA_SRC / target).is_file(), f"{target}: includes are written from cuda_src"
        assert target.split("/")[0] in below, f"{layer} includes {target}"
    assert not re.search(r"^\s*#\s*include\s*<", text, re.MULTILINE), "NVRTC has no toolkit headers"


@pytest.mark.parametrize("path", CUDA_FILES, ids=lambda path: str(path.relative_to(CUDA_SRC)))
def test_asm_only_in_ptx(path):
    code = re.sub(r"//[^\n]*|/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    if path.relative_to(CUDA_SRC).parts[0] != "ptx":
        assert not re.search(r"\basm\b|\b__asm__\b", code)


def test_environment_variables_have_one_home():
    expected = {variable.name for variable in env.VARIABLES}
    assert len(expected) == 8
    for path in PYTHON_FILES:
        text = path.read_text(encoding="utf-8")
        constants = {
            node.value
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        named = {value for value in constants if re.fullmatch(r"FLASHMLA_[A-Z_]+", value)}
        if path == PACKAGE / "runtime" / "env.py":
            assert named == expected
        else:
            assert not named, f"{path.name} names {named}: ask runtime/env.py"
        mentioned = set(re.findall(r"FLASHMLA_[A-Z_]*[A-Z]", text))
        assert mentioned <= expected, f"{path.name} mentions {mentioned - expected}"
