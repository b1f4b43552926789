"""compile, cache and inspect, all without a GPU: NVRTC makes cubins anywhere."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import textwrap

import pytest

from flashmla_cupy.errors import FlashMLAError, KernelCompileError
from flashmla_cupy.runtime import cache, inspect
from tests.common import REPO, TOY


def entries(tmp_path):
    return sorted((tmp_path / "cache").glob("*.kernel"))


def run_python(code: str, **variables: str) -> subprocess.Popen:
    environment = {**os.environ, "PYTHONPATH": str(REPO), **variables}
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def test_compile_then_cache(toy_src, fresh_runtime, tmp_path):
    first = fresh_runtime.compile_cubin(TOY)
    assert not first.from_cache and first.seconds > 0
    assert first.record == inspect.Record(threads=128, cluster=2, smem_bytes=65536, params_bytes=144)
    assert first.registers > 0 and first.spill_bytes == 0 and first.local_bytes == 0
    fresh_runtime.forget()
    again = fresh_runtime.compile_cubin(TOY)
    assert again.from_cache and again.cubin == first.cubin and again.record == first.record
    assert again.resources == first.resources and again.seconds == first.seconds
    assert len(entries(tmp_path)) == 1 and entries(tmp_path)[0].name.startswith("toy.sm90.f32.n128-")
    assert not fresh_runtime.compile_cubin(TOY, use_cache=False).from_cache


def test_header_edit_recompiles_and_an_unused_one_does_not(toy_src, fresh_runtime):
    first = fresh_runtime.compile_cubin(TOY)
    (toy_src / "toy/unused.cuh").write_text("#pragma once\nint unused;\n")
    assert fresh_runtime.compile_cubin(TOY).from_cache
    value = toy_src / "toy/value.cuh"
    value.write_text(value.read_text().replace("1.f", "2.f"))
    edited = fresh_runtime.compile_cubin(TOY)
    assert not edited.from_cache and edited.cubin != first.cubin


@pytest.mark.parametrize("name", ["FLASHMLA_LINEINFO", "FLASHMLA_DEVICE_ASSERT"])
def test_variables_that_affect_code_enter_the_key(toy_src, fresh_runtime, monkeypatch, name):
    fresh_runtime.compile_cubin(TOY)
    monkeypatch.setenv(name, "1")
    assert not fresh_runtime.compile_cubin(TOY).from_cache
    monkeypatch.setenv(name, "0")
    assert fresh_runtime.compile_cubin(TOY).from_cache


def test_device_assert_macro(toy_src, fresh_runtime, monkeypatch):
    value = toy_src / "toy/value.cuh"
    value.write_text(value.read_text() + "#ifdef FLASHMLA_DEVICE_ASSERT\n#error asserts are on\n#endif\n")
    fresh_runtime.compile_cubin(TOY)
    monkeypatch.setenv("FLASHMLA_DEVICE_ASSERT", "1")
    with pytest.raises(KernelCompileError, match="asserts are on"):
        fresh_runtime.compile_cubin(TOY)


@pytest.mark.parametrize("damage", ["empty", "short", "flipped", "text", "other version"])
def test_damaged_entry_is_rebuilt(toy_src, fresh_runtime, tmp_path, damage):
    first = fresh_runtime.compile_cubin(TOY)
    (entry,) = entries(tmp_path)
    content = entry.read_bytes()
    middle = len(content) // 2
    entry.write_bytes({
        "empty": b"",
        "short": content[:middle],
        "flipped": content[:middle] + bytes([content[middle] ^ 1]) + content[middle + 1 :],
        "text": b"not a kernel\n\n",
        "other version": content.replace(b"kernel-1", b"kernel-0", 1),
    }[damage])  # fmt: skip
    fresh_runtime.forget()
    rebuilt = fresh_runtime.compile_cubin(TOY)
    assert not rebuilt.from_cache and rebuilt.record == first.record
    fresh_runtime.forget()
    assert fresh_runtime.compile_cubin(TOY).from_cache


@pytest.mark.parametrize("place", ["file in the way", "read-only", "no home"])
def test_without_a_writable_folder_kernels_stay_in_memory(toy_src, fresh_runtime, monkeypatch, tmp_path, place):
    if place == "no home":
        monkeypatch.delenv("FLASHMLA_CACHE_DIR")
        monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
        monkeypatch.setenv("HOME", "/proc/no/such/home")
    elif place == "file in the way":
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("FLASHMLA_CACHE_DIR", str(tmp_path / "file/cache"))
    else:
        folder = tmp_path / "cache"
        folder.mkdir()
        folder.chmod(stat.S_IRUSR | stat.S_IXUSR)
        if os.access(folder, os.W_OK):  # root: only a stand-in for the refused write is left
            monkeypatch.setattr(cache, "_new_file", _refuse)
    assert not fresh_runtime.compile_cubin(TOY).from_cache
    assert fresh_runtime.compile_cubin(TOY).from_cache
    fresh_runtime.forget()
    assert not fresh_runtime.compile_cubin(TOY).from_cache
    assert cache.info().entries == 0


def _refuse(*_, **__):
    raise PermissionError("read-only")


def test_disk_full_leaves_no_file(toy_src, fresh_runtime, monkeypatch, tmp_path):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(cache.os, "replace", full)
    assert not fresh_runtime.compile_cubin(TOY).from_cache
    assert not [file for file in (tmp_path / "cache").iterdir() if file.suffix != ".lock"]


def test_a_source_that_changes_while_compiling_is_not_cached(toy_src, fresh_runtime, monkeypatch, tmp_path):
    value, build, builds = toy_src / "toy/value.cuh", fresh_runtime._build, []

    def edit_while_building(*arguments):
        if not builds:
            value.write_text(value.read_text().replace("1.f", "2.f"))
        builds.append(build(*arguments))
        return builds[-1]

    monkeypatch.setattr(fresh_runtime, "_build", edit_while_building)
    assert not fresh_runtime.compile_cubin(TOY).from_cache
    assert len(builds) == 2 and len(entries(tmp_path)) == 1


@pytest.mark.timeout(240)
def test_sixteen_cold_processes(toy_src, fresh_runtime, tmp_path):
    code = f"""
        from flashmla_cupy.runtime import compile
        from flashmla_cupy.runtime.spec import KernelSpec
        compiled = compile.compile_cubin({TOY!r})
        print(compiled.record.threads, int(compiled.from_cache))
    """
    processes = [run_python(code) for _ in range(16)]
    results = [(process.communicate(timeout=200), process.returncode) for process in processes]
    assert all(code == 0 for _, code in results), results
    outputs = [out.split() for (out, _), _ in results]
    assert [out[0] for out in outputs] == ["128"] * 16
    assert [out[1] for out in outputs].count("0") == 1, "the lock lets one process compile"
    assert len(entries(tmp_path)) == 1 and not list((tmp_path / "cache").glob("*.tmp"))


def test_error_names_file_and_line_and_leaves_no_entry(toy_src, fresh_runtime, tmp_path):
    (toy_src / "toy/value.cuh").write_text("#pragma once\n\nfloat value() { return undefined_name; }\n")
    with pytest.raises(KernelCompileError) as caught:
        fresh_runtime.compile_cubin(TOY)
    message = str(caught.value)
    assert message == 'toy.sm90.f32.n128: cuda_src/toy/value.cuh:3: identifier "undefined_name" is undefined'
    assert "undefined_name" in caught.value.log
    assert entries(tmp_path) == []
    (toy_src / "toy/value.cuh").write_text("#pragma once\nfloat value() { return 1.f; }\n")
    with pytest.raises(KernelCompileError, match='cuda_src/toy/kernel_sm90.cuh:5: .*"gone.cuh"'):
        kernel = toy_src / "toy/kernel_sm90.cuh"
        kernel.write_text(kernel.read_text().replace("namespace", '#include "gone.cuh"\nnamespace', 1))
        fresh_runtime.compile_cubin(TOY)


@pytest.mark.parametrize("code", ["C7510", "C7515", "C7507", "C7508"])
def test_lost_performance_is_an_error(toy_src, fresh_runtime, monkeypatch, tmp_path, code):
    run = fresh_runtime._run_nvrtc
    line = f"ptxas info    : ({code}) Potential Performance Loss: something was serialized"
    monkeypatch.setattr(fresh_runtime, "_run_nvrtc", lambda *a: (run(*a)[0], f"ptxas info\n{line}\n"))
    monkeypatch.setattr(fresh_runtime, "nvrtc_version", lambda: (12, 8))
    with pytest.raises(KernelCompileError, match=rf"{code}.*NVRTC 12\.8; 12\.9 or newer is needed"):
        fresh_runtime.compile_cubin(TOY)
    assert entries(tmp_path) == []


def test_dump_dir(toy_src, fresh_runtime, monkeypatch, tmp_path):
    monkeypatch.setenv("FLASHMLA_DUMP_DIR", str(tmp_path / "dump"))
    compiled = fresh_runtime.compile_cubin(TOY)
    dumped = {file.suffix: file.read_bytes() for file in (tmp_path / "dump").iterdir()}
    assert dumped[".cubin"] == compiled.cubin and b"Used" in dumped[".log"] and b"flashmla_record" in dumped[".cu"]


def test_warmup(toy_src, fresh_runtime):
    import dataclasses

    wide = dataclasses.replace(TOY, config=("float", "256"), tag=("f32", "n256"))
    broken = dataclasses.replace(TOY, config=("no_such_type", "256"), tag=("broken",))
    seen = []
    results = fresh_runtime.warmup([TOY, wide, broken, TOY], on_done=lambda spec, result: seen.append(spec))
    assert len(results) == 3 and set(seen) == {TOY, wide, broken}
    assert results[wide].record.threads == 256 and isinstance(results[broken], KernelCompileError)
    fresh_runtime.forget()
    assert fresh_runtime.compile_cubin(wide).from_cache
    information = cache.info()
    assert information.entries == 2 and information.size_bytes > 2000 and information.writable
    assert cache.clear() == 2 and cache.info().entries == 0 and not list(information.directory.iterdir())


def test_ptx_and_elf(toy_src, fresh_runtime):
    assert f".entry {TOY.entry}" in fresh_runtime.ptx(TOY) and "sm_90a" in fresh_runtime.ptx(TOY)
    cubin = fresh_runtime.compile_cubin(TOY).cubin
    assert inspect.complete_elf(cubin) == cubin
    assert len(inspect.symbol_bytes(cubin, "flashmla_record")) == 16
    with pytest.raises(ValueError, match="no symbol nothing"):
        inspect.symbol_bytes(cubin, "nothing")
    with pytest.raises(ValueError, match="ELF64"):
        inspect.symbol_bytes(b"text", "nothing")


def test_sass(toy_src, fresh_runtime, monkeypatch):
    cubin = fresh_runtime.compile_cubin(TOY).cubin
    if inspect.find_tool("nvdisasm") or inspect.find_tool("cuobjdump"):
        assert "EXIT" in inspect.sass(cubin)
    monkeypatch.setattr(inspect, "find_tool", lambda name: None)
    with pytest.raises(FlashMLAError, match="neither nvdisasm nor cuobjdump found"):
        inspect.sass(cubin)


def test_resources_of_a_log_with_spills():
    log = (
        "ptxas info    : Compiling entry function 'k' for 'sm_90a'\nptxas info    : Function properties for k\n"
        "ptxas         .     48 bytes stack frame, 40 bytes spill stores, 44 bytes spill loads\n"
        "ptxas info    : Used 168 registers, used 9 barriers, 48 bytes cumulative stack size, 1024 bytes smem\n"
    )
    found = inspect.resources(log)
    assert found == inspect.Resources(168, 9, 48, 40, 44, 1024) and found.spill_bytes == 84


def test_import_touches_nothing_and_fork_works(toy_src, fresh_runtime, tmp_path):
    """Import makes no CUDA call (a failing driver would raise), writes no file, and a child of fork can compile."""
    code = f"""
        import os, sys
        import flashmla_cupy, flashmla_cupy.errors
        assert "cupy" not in sys.modules and "cuda" not in sys.modules
        import flashmla_cupy.runtime.compile, flashmla_cupy.runtime.tensor_map, flashmla_cupy.runtime.device
        assert "cuda.bindings.driver" not in sys.modules
        assert "libcuda.so" not in open("/proc/self/maps").read()
        assert not os.path.exists(os.environ["FLASHMLA_CACHE_DIR"])
        from flashmla_cupy.runtime.spec import KernelSpec
        child = os.fork()
        if child == 0:
            flashmla_cupy.runtime.compile.compile_cubin({TOY!r})
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    process = run_python(code)
    _, errors = process.communicate(timeout=100)
    assert process.returncode == 0, errors
    assert len(entries(tmp_path)) == 1


@pytest.mark.parametrize("umask, mode", [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_entries_follow_the_umask(toy_src, fresh_runtime, tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        fresh_runtime.compile_cubin(TOY)
    finally:
        os.umask(before)
    assert stat.S_IMODE(entries(tmp_path)[0].stat().st_mode) == mode


def test_a_folder_at_the_place_of_an_entry(toy_src, fresh_runtime, tmp_path):
    fresh_runtime.compile_cubin(TOY)
    (entry,) = entries(tmp_path)
    entry.unlink()
    entry.mkdir()
    fresh_runtime.forget()
    assert not fresh_runtime.compile_cubin(TOY).from_cache
    assert cache.info().entries == 0 and cache.clear() == 0 and entry.is_dir()
    assert not list((tmp_path / "cache").glob(".*.tmp"))


def test_a_dump_that_fails_is_a_warning(toy_src, fresh_runtime, monkeypatch, tmp_path, caplog):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FLASHMLA_DUMP_DIR", str(tmp_path / "file"))
    assert fresh_runtime.compile_cubin(TOY).cubin
    assert [record.levelname for record in caplog.records] == ["WARNING"] and "FLASHMLA_DUMP_DIR" in caplog.text
