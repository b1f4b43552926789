"""README.md and docs: examples run, commands parse, tables and links agree with the code."""

from __future__ import annotations

import re
import runpy
import shlex

import click
import numpy as np
import pytest

import flashmla_cupy
from flashmla_cupy.ops import _checks
from flashmla_cupy.ops._select import experimental_kernels
from flashmla_cupy.runtime import compile as runtime_compile
from flashmla_cupy.runtime import env
from tests.common import REPO

README = (REPO / "README.md").read_text(encoding="utf-8")
PAGES = [REPO / "README.md", *sorted((REPO / "docs").rglob("*.md"))]
CLI = runpy.run_path(str(REPO / "cli.py"), run_name="cli")["cli"]


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)


MARKS = {  # the first that a block contains names it
    "torch": "import torch",
    "graph": "begin_capture",
    "merge": "import merge_states",
    "sparse": "import quantize_kv_cache",
    "cupy": "import cupy",
    "numpy": "import numpy",
}
PYTHON = {next(name for name, mark in MARKS.items() if mark in text): text for text in blocks("python")}


def run(text: str, namespace: dict) -> dict:
    exec(compile(text, "README.md", "exec"), namespace)
    return namespace


# ---- examples


def test_every_kind_of_example_is_there():
    assert set(PYTHON) == set(MARKS) and len(PYTHON) == len(blocks("python"))


def test_examples_on_numpy():
    """The CuPy examples are the NumPy ones too: only the array module differs."""
    names = run(PYTHON["cupy"].replace("import cupy as cp", "import numpy as cp"), {})
    run(PYTHON["merge"], names)
    whole, whole_lse = flashmla_cupy.flash_mla_with_kvcache(
        names["q"], names["k_cache"], names["block_table"], names["cache_seqlens"], 512)  # fmt: skip
    np.testing.assert_allclose(names["merged"].astype(np.float32), whole.astype(np.float32), atol=0.03)
    np.testing.assert_allclose(names["merged_lse"], whole_lse, rtol=1e-5)
    run(PYTHON["sparse"], names)
    assert names["fp8_cache"].shape == (64, 64, 1, 656) and np.isfinite(names["sparse_lse"]).any()
    compile(PYTHON["graph"], "README.md", "exec")
    run(PYTHON["numpy"], {})


def test_torch_example_on_the_cpu():
    pytest.importorskip("torch")
    names = run(PYTHON["torch"].replace('"cuda"', '"cpu"'), {})
    assert names["out"].shape == (2, 1, 16, 512) and names["lse"].isfinite().all()


@pytest.mark.gpu
def test_examples_on_the_gpu():
    with experimental_kernels():
        names = run(PYTHON["cupy"], {})
        for name in ("merge", "graph", "sparse"):
            run(PYTHON[name], names)
    host = {name: names[name].get() for name in ("q", "k_cache", "block_table", "cache_seqlens")}
    out, lse = flashmla_cupy.flash_mla_with_kvcache(*host.values(), 512, causal=True)
    np.testing.assert_allclose(names["out"].get().astype(np.float32), out.astype(np.float32), atol=0.03)
    np.testing.assert_allclose(names["lse"].get(), lse, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_torch_example_on_the_gpu():
    pytest.importorskip("torch")
    with experimental_kernels():
        assert run(PYTHON["torch"], {})["out"].isfinite().all()


# ---- commands


def cli_lines() -> list[list[str]]:
    lines = re.findall(r"(?:flashmla-cupy|python cli\.py) ([a-z][^\n`#&]*)", "\n".join(blocks("bash")))
    inline = re.findall(r"`(?:flashmla-cupy|python cli\.py)\s+([a-z][^`]*)`", README)
    return [shlex.split(line) for line in lines + inline]


def parse(arguments: list[str]) -> tuple[str, ...]:
    """Path of the command that a line calls. Raises an error on a wrong command or option; runs nothing."""
    command, path = CLI, ()
    while isinstance(command, click.Group):
        name, *arguments = arguments
        command, path = command.commands[name], (*path, name)
    with command.make_context(path[-1], arguments):
        return path


def leaves(group: click.Group, path: tuple[str, ...] = ()) -> set[tuple[str, ...]]:
    found = set()
    for name, command in group.commands.items():
        found |= leaves(command, (*path, name)) if isinstance(command, click.Group) else {(*path, name)}
    return found


def test_commands_parse_and_all_are_shown():
    assert {parse(arguments) for arguments in cli_lines()} == leaves(CLI)


def test_two_setup_commands_and_ci_runs_the_second():
    setup = README.split("## Set-up")[1].split("###")[0]
    (block,) = re.findall(r"```bash\n(.*?)```", setup, re.DOTALL)
    first, second = block.strip().splitlines()
    assert first.endswith("flashmla-cupy validate") and second.endswith("pytest -q")
    assert second in (REPO / ".ci" / "run").read_text().splitlines()


# ---- facts


def test_names_are_exported():
    for name in re.findall(r"from flashmla_cupy import ([\w, ]+)", README):
        assert {word.strip() for word in name.split(",")} <= set(flashmla_cupy.__all__)
    for name in flashmla_cupy.__all__:
        assert name == "__version__" or hasattr(flashmla_cupy, name)


def test_environment_variables():
    assert re.findall(r"^\| `(FLASHMLA_\w+)`", README, re.MULTILINE) == [variable.name for variable in env.VARIABLES]


def test_support_matrix():
    row = next(line for line in README.splitlines() if line.startswith("| dense decode"))
    assert ", ".join(map(str, _checks.PAGE_SIZES)) in row
    assert " or ".join(map(str, sorted(_checks.HEAD_DIMS_QK, reverse=True))) in row
    assert all(dtype in row for dtype in _checks.Q_DTYPES)


@pytest.mark.parametrize("page", PAGES, ids=lambda path: str(path.relative_to(REPO)))
def test_links_lead_somewhere(page):
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text(encoding="utf-8")):
        path, _, anchor = target.partition("#")
        if not path:
            assert re.search(rf"^#+ {anchor}$", page.read_text(encoding="utf-8"), re.MULTILINE | re.IGNORECASE), target
        elif "://" not in path:
            assert (page.parent / path).exists(), target


def test_the_schedule_figure_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    script = REPO / "docs" / "kernels" / "dense_decode_schedule.py"
    runpy.run_path(str(script))["draw"](tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG") and script.with_suffix(".png").is_file()


def test_the_compiler_that_is_needed_is_stated_and_installed():
    needed = ".".join(map(str, runtime_compile.NEEDED_NVRTC))
    assert f'"nvidia-cuda-nvrtc-cu12>={needed}"' in (REPO / "pyproject.toml").read_text(encoding="utf-8")
    assert f"NVRTC must be {needed} or newer" in README
