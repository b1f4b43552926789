# ruff: noqa: F811 (the fixtures)
"""Commands with bad values, bad files and bad folders: one readable line, or the right result."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from test_cli import fake_compile, invoke, no_gpu  # noqa: F401

from flashmla_cupy.ops import _select
from flashmla_cupy.runtime import env
from flashmla_cupy.testing import report
from tests.common import REPO, TOY


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """`flashmla-cupy` as it runs from a checkout that was installed with -e."""
    return subprocess.run([sys.executable, "-m", "flashmla_cupy", *arguments], capture_output=True, timeout=100,
                          env={**os.environ, "PYTHONPATH": str(REPO), **variables}, cwd=REPO)


# ---- schedule ----
@pytest.mark.parametrize("lengths, message", [
    ("3000000000", "got 3000000000, expected at most 2147483647"),
    ("1x99999999999", "got '1x99999999999', expected 1 to 65536 requests"), ("1x40000,1x40000", "65536 requests"),
    ("²", "got '²'"), ("5x", "got '5x'"), ("5x0", "got '5x0'"), ("", "got ''"), ("-1", "got '-1'"), ("1,,2", "got ''"),
    ("9" * 5000, "expected a number"),
])
def test_lengths(lengths, message):
    output = invoke("schedule", "--lengths", lengths, code=1)
    assert output.startswith("Error: lengths: ") and message in output and output.count("\n") == 1


@pytest.mark.parametrize("option, value", [("--mean", "2147483648"), ("--batch", "99999999"), ("--sm-count", "70000"),
                                           ("--h-q", "2147483648"), ("--h-kv", "0"), ("--s-q", "2147483648")])
def test_numbers_out_of_range(option, value):
    assert f"Invalid value for '{option}'" in invoke("schedule", option, value, code=2)


def test_the_largest_lengths():
    assert "2 requests, 67108864 KV blocks" in invoke("schedule", "--lengths", "2147483647x2")
    assert "3 requests" in invoke("schedule", "--batch", "3", "--mean", "2147483647", "--varlen")


def test_ascii_output():
    done = command("schedule", "--batch", "3", PYTHONIOENCODING="ascii")
    assert done.returncode == 0 and b"##" in done.stdout, done.stderr


# ---- files to write ----
def test_a_picture_gets_the_name_that_was_asked_for(tmp_path):
    pytest.importorskip("matplotlib")
    path = tmp_path / "noext"
    assert str(path) in invoke("schedule", "--batch", "2", "--png", str(path)).replace("\n", "")
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("arguments", [
    ("validate", "--json"), ("validate", "--record"), ("bench", "--json"), ("bench", "--plot"), ("schedule", "--png")])
@pytest.mark.parametrize("place", ["below a file", "a folder", "in a folder that is not there", "in /proc"])
def test_files_are_refused_before_the_work(tmp_path, monkeypatch, arguments, place):
    monkeypatch.setattr(report, "check_picture", lambda option, path: None)
    (tmp_path / "file").write_text("")
    path = {"below a file": tmp_path / "file" / "x.png", "a folder": tmp_path, "in /proc": Path("/proc/x.png"),
            "in a folder that is not there": tmp_path / "new" / "x.png"}[place]
    output = invoke(*arguments, str(path), code=1)
    assert output.startswith(f"Error: {arguments[1]}: got ") and output.count("\n") == 1
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.parametrize("folder", ["new/dump", "file/dump", "/proc/dump"])
def test_a_dump_goes_into_a_folder_whose_parent_exists(fake_compile, tmp_path, folder):
    (tmp_path / "file").write_text("")
    output = invoke("kernels", "dump", "sched_meta", "--to", str(tmp_path / folder), code=1)
    assert output.startswith("Error: --to: got ") and output.count("\n") == 1 and not fake_compile[0]
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_pictures_are_png():
    pytest.importorskip("matplotlib")
    assert "expected a name that ends in .png" in invoke("schedule", "--png", "plan.svg", code=1)


@pytest.mark.parametrize("arguments", [("bench", "--plot", "x.png"), ("schedule", "--png", "x.png")])
def test_matplotlib_is_asked_for_first(monkeypatch, arguments):
    find_spec = importlib.util.find_spec
    monkeypatch.setattr(report, "find_spec", lambda name: None if name == "matplotlib" else find_spec(name))
    assert invoke(*arguments, code=1) == f"Error: {arguments[1]}: matplotlib is not installed (pip install " \
                                         "matplotlib)\n"


# ---- env and cache ----
def test_env_names_what_cannot_be_used(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    bad = {"CUDA_SRC": str(tmp_path), "CACHE_DIR": "~nouser/[x]", "LOG": "loud", "DUMP_DIR": str(tmp_path / "file/x"),
           "LINEINFO": "2"}
    for name, value in bad.items():
        monkeypatch.setenv(f"FLASHMLA_{name}", value)
    variables = json.loads(invoke("env", "--json"))["variables"]
    for name in bad:
        assert variables[f"FLASHMLA_{name}"]["problem"].startswith(f"FLASHMLA_{name}: ")
    assert variables["FLASHMLA_DISABLE_PDL"]["problem"] is None
    output = invoke("env")
    assert all(f"FLASHMLA_{name}: " in output for name in bad) and "~nouser/[x]" in output


@pytest.mark.parametrize("arguments", [("cache", "info"), ("cache", "clear")])
def test_cache_commands_name_the_variable(monkeypatch, tmp_path, arguments):
    monkeypatch.setenv("FLASHMLA_CACHE_DIR", "~nouser")
    assert invoke(*arguments, code=1).startswith("Error: FLASHMLA_CACHE_DIR: got '~nouser'")
    monkeypatch.setenv("FLASHMLA_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("FLASHMLA_CUDA_SRC", "~nouser")
    invoke(*arguments)


def test_an_unreadable_home(monkeypatch, tmp_path):
    def refuse(path, *_, **__):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "stat", refuse)
    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setenv("FLASHMLA_CACHE_DIR", str(tmp_path))
    assert "0 kernels" in invoke("cache", "info") and "removed 0" in invoke("cache", "clear")


def test_cache_info_counts_what_cannot_be_read(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHMLA_CACHE_DIR", str(tmp_path))
    (tmp_path / "a.kernel").write_bytes(b"x")
    (tmp_path / "b.kernel").write_bytes(b"x")
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != "a.kernel" and access(path, mode))
    assert "2 kernels" in invoke("cache", "info") and "1 of them not readable" in invoke("cache", "info")
    monkeypatch.setattr(os, "access", lambda path, mode: mode != os.R_OK | os.X_OK and access(path, mode))
    assert "cannot look into it" in invoke("cache", "info")


def test_variables_are_checked_first(monkeypatch):
    monkeypatch.setenv("FLASHMLA_DISABLE_PDL", "maybe")
    for arguments in (("validate", "--op", "combine"), ("bench",), ("kernels", "compile", "combine"),
                      ("cache", "warmup", "combine")):
        assert invoke(*arguments, code=1) == "Error: FLASHMLA_DISABLE_PDL: got 'maybe', expected 0 or 1\n"


# ---- kernels ----
@pytest.fixture
def only_toy(toy_src, monkeypatch):
    monkeypatch.setattr(_select, "all_specs", lambda: (TOY,))
    return toy_src


@pytest.mark.parametrize("trouble", ["undecodable", "forbidden"])
def test_a_source_that_cannot_be_read_is_a_failed_row(only_toy, monkeypatch, trouble):
    value, good, states = only_toy / "toy/value.cuh", (only_toy / "toy/value.cuh").read_bytes(), []
    read_text = Path.read_text

    def forbid(path, *arguments, **options):
        if path == value:
            raise PermissionError(13, "Permission denied", str(path))
        return read_text(path, *arguments, **options)

    def break_it():
        if trouble == "undecodable":
            value.write_bytes(b"\xff\xfe")
        else:
            monkeypatch.setattr(Path, "read_text", forbid)

    def mend_it():
        value.write_bytes(good + b"// mended\n")
        monkeypatch.setattr(Path, "read_text", read_text)

    reason = "value.cuh: not UTF-8 text" if trouble == "undecodable" else "Permission denied"
    break_it()
    output = invoke("kernels", "compile", code=1)
    assert "failed" in output and reason in output and TOY.name in output
    mend_it()
    steps = iter([break_it, lambda: None, mend_it, lambda: None])
    monkeypatch.setattr("time.sleep", lambda seconds: (next(steps)(), states.append(seconds)))
    output = invoke("kernels", "watch", "--rounds", "4")
    assert output.count("Compiled kernels") == 3 and output.count(reason) == 1 and len(states) == 4


def test_watch_says_when_a_source_stays_away(only_toy, monkeypatch):
    kernel = only_toy / TOY.kernel_file
    text = kernel.read_text()
    steps = iter([kernel.unlink, lambda: kernel.write_text(text), kernel.unlink, lambda: None, lambda: None])
    monkeypatch.setattr("time.sleep", lambda seconds: next(steps)())
    output = invoke("kernels", "watch", "--rounds", "5")
    assert output.count("Compiled kernels") == 2  # not for one look
    assert output.count(f"\n{TOY.name}: no {TOY.kernel_file}") == output.count(TOY.kernel_file) == 1


def test_dump_of_a_kernel_that_does_not_compile(only_toy, tmp_path):
    kernel = only_toy / TOY.kernel_file
    kernel.write_text(kernel.read_text() + "nonsense\n")
    invoke("kernels", "dump", "--to", str(tmp_path / "dump"), code=1)
    assert {path.name for path in (tmp_path / "dump").iterdir()} == {f"{TOY.name}.cu", f"{TOY.name}.log"}
    assert "nonsense" in (tmp_path / "dump" / f"{TOY.name}.log").read_text()


def test_watch_with_a_dump_folder_that_cannot_be_written(only_toy, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHMLA_DUMP_DIR", str(tmp_path / "file" / "dump"))
    monkeypatch.setattr("time.sleep", lambda seconds: None)
    output = invoke("kernels", "watch", "--rounds", "1")
    assert "compiled" in output and "failed" not in output
    assert "FLASHMLA_DUMP_DIR: toy.sm90.f32.n128 not dumped" in caplog.text


@pytest.mark.parametrize("arch", ["compute_90", "nonsense", "sm_", "sm_90b", "90a", "SM_90", ""])
def test_the_form_of_an_architecture(fake_compile, arch):
    output = invoke("kernels", "compile", "--arch", arch, code=2)
    assert "Invalid value for '--arch'" in output and f"got {arch!r}, expected sm_" in output and not fake_compile[0]


def test_an_architecture_that_nvrtc_does_not_know_is_a_failed_row(fresh_runtime):
    output = invoke("kernels", "compile", "combine.sm80.fp32", "--arch", "sm_99", code=1)
    assert "failed" in output and "\ncombine.sm80.fp32: nvrtc: error: invalid value for --gpu-arch" in output


@pytest.mark.parametrize("name, arch, needed", [
    ("dense_decode.sm90.bf16.d576", "sm_90", "sm_90a"), ("dense_decode.sm90.bf16.d576", "sm_100a", "sm_90a"),
    ("sched_meta", "sm_75", "sm_80 or higher"), ("kv_quant.quantize_sm89.v32.bf16", "sm_80", "sm_89 or higher"),
    ("sched_meta", "sm_100f", None), ("dense_decode.sm90.bf16.d576", "sm_90a", None)])
def test_the_architecture_that_a_kernel_needs(fake_compile, name, arch, needed):
    output = invoke("kernels", "compile", name, "--arch", arch, code=1 if needed else 0)
    (spec,) = [spec for spec in _select.all_specs() if name in spec.name]
    assert bool(fake_compile[0]) == (needed is None)
    assert (f"\n{spec.name}: needs {needed}, not {arch}\n" if needed else f" {arch} ") in output


@pytest.mark.parametrize("interval", ["0", "-1", "inf"])
def test_watch_needs_an_interval(interval):
    assert "Invalid value for '--interval'" in invoke("kernels", "watch", "--interval", interval, code=2)


# ---- the command itself ----
def test_the_name_of_the_command():
    assert command("schedule", "--help").stdout.startswith(b"Usage: flashmla-cupy schedule ")


def test_a_closed_stdout():
    shell = f"{sys.executable} -m flashmla_cupy "
    for line in ("kernels list >&-", "env >&-", "kernels list | true"):
        done = subprocess.run(["bash", "-c", shell + line], capture_output=True, text=True, timeout=100, cwd=REPO,
                              env={**os.environ, "PYTHONPATH": str(REPO)})
        assert "Traceback" not in done.stderr and "Error" not in done.stderr, done.stderr


def test_can_write(tmp_path):
    (tmp_path / "file").write_text("")
    assert env.can_write(tmp_path / "a" / "b") and not env.can_write(tmp_path / "file" / "b")
    assert not env.can_write(None) and list(tmp_path.iterdir()) == [tmp_path / "file"]


def test_watch_without_sources_ends(monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHMLA_CUDA_SRC", str(tmp_path))
    assert invoke("kernels", "watch", "--rounds", "1", code=1).startswith("Error: FLASHMLA_CUDA_SRC: no common/params")
