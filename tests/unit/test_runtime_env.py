"""The environment: a home that cannot be written, values that cannot be used."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from flashmla_cupy.runtime import env
from tests.common import REPO

CALL = """
import os
import numpy as np
import flashmla_cupy
q, cache = np.ones((1, 1, 4, 576), np.float16), np.ones((1, 100, 1, 576), np.float16)
out, lse = flashmla_cupy.flash_mla_with_kvcache(q, cache, None, np.array([100], np.int32), 512)
assert (out == 1).all()
import cupy
print(os.environ.get("CUPY_CACHE_DIR", ""))
"""
COMMAND = "from flashmla_cupy.__main__ import main; main()"


def run(code: str, prefix: tuple[str, ...] = (), arguments: tuple[str, ...] = (), **variables: str,
        ) -> subprocess.CompletedProcess:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("CUPY_")}
    return subprocess.run([*prefix, sys.executable, "-c", code, *arguments], capture_output=True, text=True,
                          timeout=100, cwd="/", env={**environment, "PYTHONPATH": str(REPO), **variables})


def test_cupy_imports_where_the_home_is_a_file(tmp_path):
    (tmp_path / "file").write_text("")
    done = run(CALL, HOME=str(tmp_path / "file"))
    assert done.returncode == 0, done.stderr
    folder = done.stdout.strip()
    assert "flashmla_cupy-" in folder and not os.path.exists(folder), "it goes with the process"


@pytest.mark.parametrize("home", ["missing", "read-only"])
def test_cupy_imports_where_the_home_cannot_be_written(tmp_path, home):
    folder = tmp_path / "read-only"
    folder.mkdir(mode=0o555)
    prefix: tuple[str, ...] = ()
    if os.geteuid() == 0:  # root without its privileges is bound by permissions like anyone
        if shutil.which("setpriv") is None:
            pytest.skip("root needs setpriv to give up its privileges")
        prefix = ("setpriv", "--bounding-set=-all", "--inh-caps=-all")
    done = run(CALL, prefix, HOME=str(folder / "missing" if home == "missing" else folder))
    assert done.returncode == 0, done.stderr
    assert "flashmla_cupy-" in done.stdout and not list(folder.iterdir())


@pytest.mark.parametrize("home", ["/proc/nohome", ""])
def test_a_home_that_is_none(home):
    """Root may write anywhere by its permissions; not in /proc. For an empty HOME, expanduser says "/"."""
    before = set(os.listdir("/"))
    done = run(CALL, HOME=home)
    assert done.returncode == 0 and "flashmla_cupy-" in done.stdout, done.stderr
    variables = dict(HOME=home, XDG_CACHE_HOME="", FLASHMLA_CACHE_DIR="")
    done = run(COMMAND, arguments=("env", "--json"), **variables)
    facts = json.loads(done.stdout)
    assert not facts["cache_writable"] and facts["cache"] == (f"{home}/.cache/flashmla_cupy" if home else None)
    done = run(COMMAND, arguments=("kernels", "compile", "token_indices"), **variables)
    assert done.returncode == 0 and "compiled" in done.stdout, done.stderr
    assert set(os.listdir("/")) == before


def test_no_home_to_expand(monkeypatch):
    monkeypatch.setenv("HOME", "")
    monkeypatch.setenv("FLASHMLA_CACHE_DIR", "~/cache")
    with pytest.raises(ValueError, match="^FLASHMLA_CACHE_DIR: got '~/cache', expected a folder .there is no home"):
        env.cache_dir()


def test_a_good_home_is_left_alone(tmp_path):
    done = run("import flashmla_cupy, os, sys; assert 'CUPY_CACHE_DIR' not in os.environ and 'cupy' not in sys.modules",
               HOME=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name, value", [
    ("FLASHMLA_LOG", "loud"), ("FLASHMLA_LINEINFO", "2"), ("FLASHMLA_DEVICE_ASSERT", "maybe"),
    ("FLASHMLA_FORCE_PORTABLE", "x"), ("FLASHMLA_DISABLE_PDL", "x"), ("FLASHMLA_CACHE_DIR", "~nouser/cache"),
    ("FLASHMLA_DUMP_DIR", "~nouser"), ("FLASHMLA_CUDA_SRC", "~nouser"),
])
def test_values_are_checked_whatever_the_cache_holds(toy_src, fresh_runtime, monkeypatch, name, value):
    from tests.common import TOY

    fresh_runtime.compile_cubin(TOY)
    monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=f"{name}: got "):
        fresh_runtime.compile_cubin(TOY)
    with pytest.raises(ValueError, match=f"{name}: got "):
        fresh_runtime.warmup([TOY])
    assert list(env.problems()) == [name]


def test_a_chosen_cache_that_cannot_be_written_is_said_once(toy_src, fresh_runtime, monkeypatch, caplog):
    from tests.common import TOY

    monkeypatch.setenv("FLASHMLA_CACHE_DIR", "/proc/cache")
    for _ in range(2):
        fresh_runtime.compile_cubin(TOY)
        fresh_runtime.forget()
    (record,) = [record for record in caplog.records if record.levelname == "WARNING"]
    assert record.getMessage().startswith("FLASHMLA_CACHE_DIR: got /proc/cache, which cannot be written")
    assert record.getMessage().endswith("kernels are compiled again in each process")
    monkeypatch.delenv("FLASHMLA_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc/no")
    caplog.clear()
    fresh_runtime.compile_cubin(TOY)
    assert not caplog.records, "nobody chose that folder"


def test_what_cannot_be_written():
    assert not env.can_write(Path("/proc/nohome"))  # root included


def test_an_unknown_log_level_is_said_at_import():
    done = run(CALL, FLASHMLA_LOG="loud")
    assert done.returncode == 0
    assert done.stderr.splitlines() == ["FLASHMLA_LOG: got 'loud', expected one of debug, info, warning, error"]
    assert run(CALL, FLASHMLA_LOG="Warning").stderr == ""
