"""compute-sanitizer finds nothing in a small suite: no bad access (memcheck), no misused barrier (synccheck)."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashmla_cupy.runtime import inspect

pytestmark = pytest.mark.gpu
REPO = Path(__file__).resolve().parents[2]
SANITIZER = inspect.find_tool("compute-sanitizer")
FOUND_SOMETHING = 77


@pytest.mark.timeout(600)
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
def test_small_suite_is_clean(tool):
    if SANITIZER is None:
        pytest.skip("compute-sanitizer is not installed")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join((str(REPO), os.environ.get("PYTHONPATH", "")))}
    command = [
        SANITIZER,
        "--tool",
        tool,
        "--error-exitcode",
        str(FOUND_SOMETHING),
        "--report-api-errors",
        "no",
        sys.executable,
        "-m",
        "flashmla_cupy.testing.sanitize",
    ]
    done = subprocess.run(command, cwd=REPO, env=environment, capture_output=True, text=True, timeout=550)
    output = done.stdout + done.stderr
    if "Device not supported" in output:
        pytest.skip("compute-sanitizer does not support this device or virtual machine")
    assert done.returncode == 0, output[-3000:]
    assert "ERROR SUMMARY: 0 errors" in output and "kernels ran" in output, output[-3000:]
