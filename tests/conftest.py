"""Shared by all tests: the gpu marker, a runtime with an empty cache, a copy of cuda_src with a toy op."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from flashmla_cupy.runtime import compile as rt_compile
from flashmla_cupy.runtime import device
from tests.common import REPO


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not any(item.get_closest_marker("gpu") for item in items) or device.gpu_available():
        return
    skip = pytest.mark.skip(reason="no NVIDIA GPU that CuPy can use")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


@pytest.fixture
def fresh_runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """An empty disk cache at tmp_path/cache, no variable of the caller's, and nothing held in memory."""
    for name in ("LOG", "DUMP_DIR", "LINEINFO", "DEVICE_ASSERT", "FORCE_PORTABLE", "DISABLE_PDL"):
        monkeypatch.delenv(f"FLASHMLA_{name}", raising=False)
    monkeypatch.setenv("FLASHMLA_CACHE_DIR", str(tmp_path / "cache"))
    rt_compile.forget()
    yield rt_compile
    rt_compile.forget()


@pytest.fixture
def toy_src(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fresh_runtime) -> Path:
    """A copy of cuda_src's common folder plus the op `toy` (spec TOY): lse[i] = value() * lse_in_scale for i < batch,
    with value() in toy/value.cuh and an unused toy/unused.cuh."""
    src = tmp_path / "src"
    shutil.copytree(REPO / "cuda_src" / "common", src / "common")
    toy = src / "toy"
    toy.mkdir()
    (toy / "unused.cuh").write_text("#pragma once\n")
    (toy / "value.cuh").write_text("#pragma once\nnamespace flashmla::toy { inline float value() { return 1.f; } }\n")
    (toy / "config.cuh").write_text(
        "#pragma once\nnamespace flashmla::toy {\ntemplate <class T, int kN> struct Config {\n"
        "  static constexpr int kThreads = kN, kMinBlocks = 1, kClusterX = 2, kSmemBytes = 64 * 1024;\n};\n}\n"
    )
    (toy / "kernel_sm90.cuh").write_text(
        '#pragma once\n#include "common/params.cuh"\n#include "toy/config.cuh"\n#include "toy/value.cuh"\n'
        "namespace flashmla::toy {\ntemplate <class Config> __device__ void kernel(const CombineParams& params) {\n"
        "  const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "  if (i < params.batch) params.lse[i] = value() * params.lse_in_scale;\n}\n}\n"
    )
    monkeypatch.setenv("FLASHMLA_CUDA_SRC", str(src))
    return src
