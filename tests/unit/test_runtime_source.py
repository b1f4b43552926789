"""env, spec, params and source: what a kernel's unit is made of."""

from __future__ import annotations

import numpy as np
import pytest

from flashmla_cupy.errors import KernelCompileError
from flashmla_cupy.runtime import env, params, source
from flashmla_cupy.runtime.spec import KernelSpec
from tests.common import REPO, TOY


def test_spec_names():
    arguments = ("dense_decode", "sm90", ("bf16_t", "576"), ("bf16", "d576"), "DenseDecodeParams")
    spec = KernelSpec(*arguments)
    assert spec.name == "dense_decode.sm90.bf16.d576"
    assert spec.entry == "dense_decode_sm90_bf16_d576"
    assert spec.kernel_file == "dense_decode/kernel_sm90.cuh"
    assert len({spec, KernelSpec(*arguments)}) == 1


def test_spec_rejects_a_name_that_is_no_symbol():
    with pytest.raises(ValueError, match="spec: got 'toy.sm90.d-576'"):
        KernelSpec("toy", "sm90", (), ("d-576",), "CombineParams")


def test_eight_variables():
    assert len(env.VARIABLES) == 8
    assert all(variable.name.startswith("FLASHMLA_") and variable.meaning for variable in env.VARIABLES)


@pytest.mark.parametrize("text, value", [("1", True), ("on", True), ("0", False), ("", False), ("False", False)])
def test_flags(monkeypatch, text, value):
    monkeypatch.setenv("FLASHMLA_LINEINFO", text)
    assert env.lineinfo() is value


def test_flag_with_a_wrong_value(monkeypatch):
    monkeypatch.setenv("FLASHMLA_LINEINFO", "maybe")
    with pytest.raises(ValueError, match="FLASHMLA_LINEINFO: got 'maybe', expected 0 or 1"):
        env.lineinfo()


def test_log_level(monkeypatch):
    monkeypatch.setenv("FLASHMLA_LOG", "loud")
    with pytest.raises(ValueError, match="FLASHMLA_LOG: got 'loud'"):
        env.logger()


def test_cache_dir_order(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("FLASHMLA_CACHE_DIR", raising=False)
    assert env.cache_dir() == tmp_path / "home/.cache/flashmla_cupy"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert env.cache_dir() == tmp_path / "xdg/flashmla_cupy"
    monkeypatch.setenv("FLASHMLA_CACHE_DIR", str(tmp_path / "own"))
    assert env.cache_dir() == tmp_path / "own"


@pytest.mark.parametrize("name", params.STRUCTS)
def test_params_layout(name):
    dtype = params.STRUCTS[name]
    record = params.new(name)
    assert record.shape == () and record.dtype == dtype and not any(record.tobytes())
    covered = np.zeros(dtype.itemsize, int)
    for field_dtype, offset in dtype.fields.values():
        covered[offset : offset + field_dtype.itemsize] += 1
    assert covered.max() == 1, "no two fields overlap"


@pytest.mark.parametrize("name", params.STRUCTS)
def test_params_agree_with_the_header(name, fresh_runtime):
    headers = sorted(path.relative_to(REPO / "cuda_src").as_posix() for path in REPO.glob("cuda_src/*/params.cuh"))
    unit = "".join(f'#include "{header}"\n' for header in headers) + params.static_asserts(name)
    fresh_runtime._run_nvrtc(TOY, unit, fresh_runtime.options("sm_90a"))


@pytest.mark.parametrize(
    "old, new, message",
    [
        ("int32_t n_direct;", "int64_t n_direct;", "CombineParams: size differs"),
        ("int32_t n_direct;", "int32_t unknown; int32_t n_direct;", "CombineParams: size differs|n_direct: layout"),
        ("float lse_in_scale;", "int32_t heads_per_kv_shift;", None),
    ],
)
def test_drift_of_the_header_is_a_compile_error(toy_src, fresh_runtime, old, new, message):
    header = toy_src / "common/params.cuh"
    text = header.read_text()
    assert old in text
    if message is None:  # two fields swap places: the size stays
        start = text.index("struct CombineParams")
        struct = text[start:].replace(old, "@", 1).replace(new, old, 1).replace("@", new, 1)
        text, message = text[:start] + struct, "lse_in_scale: layout differs"
    else:
        text = text.replace(old, new)
    header.write_text(text)
    with pytest.raises(KernelCompileError, match="static assertion") as caught:
        fresh_runtime.compile_cubin(TOY)
    assert caught.match(message)


def test_source_root(monkeypatch, tmp_path):
    monkeypatch.delenv("FLASHMLA_CUDA_SRC", raising=False)
    assert source.source_root() == REPO / "cuda_src"
    monkeypatch.setenv("FLASHMLA_CUDA_SRC", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="FLASHMLA_CUDA_SRC: no common/params.cuh in"):
        source.source_root()


def test_transitive_files(toy_src):
    assert source.transitive_files(TOY) == [
        "common/params.cuh",
        "common/types.cuh",
        "toy/config.cuh",
        "toy/kernel_sm90.cuh",
        "toy/value.cuh",
    ]


def test_missing_kernel_file(toy_src):
    with pytest.raises(FileNotFoundError, match="^no toy/kernel_sm80.cuh in"):
        source.generate(KernelSpec("toy", "sm80", (), (), "CombineParams"))


def test_digest_follows_what_is_included(toy_src):
    digest, unit = source.digest(TOY), source.generate(TOY)
    (toy_src / "toy/unused.cuh").write_text("#pragma once\nint unused;\n")
    assert (source.digest(TOY), source.generate(TOY)) == (digest, unit)
    types = toy_src / "common/types.cuh"
    types.write_text(types.read_text() + "// a comment\n")
    assert source.digest(TOY) != digest and source.generate(TOY) != unit


def test_evidence_digest_ignores_comments_only(toy_src):
    value = toy_src / "toy/value.cuh"
    plain, evidence, digest = value.read_text(), source.evidence_digest(TOY), source.digest(TOY)
    value.write_text("// first line\n\n" + plain.replace("\n", "  // why\n"))
    assert source.evidence_digest(TOY) == evidence and source.digest(TOY) != digest
    value.write_text(plain.replace("1.f", "2.f"))
    assert source.evidence_digest(TOY) != evidence
    assert source.strip_comments("int a; // x\n\n  /* y\n z */ int b;\n") == "int a;\n    int b;"
    assert source.strip_comments('asm("// kept"); // gone') == 'asm("// kept");'


def test_template_arguments_resolve_inside_the_namespace(toy_src):
    assert "namespace flashmla { using UnitConfig = toy::Config<float, 128>; }" in source.generate(TOY)
    plain = KernelSpec("toy", "sm90", (), (), "CombineParams")
    assert "using UnitConfig = toy::Config; }" in source.generate(plain)


def test_record_dtype_is_native():
    assert all(dtype.isnative for dtype in params.STRUCTS.values())
    assert params.STRUCTS["DenseDecodeParams"].fields["k_map"][0] == np.dtype(("u1", (128,)))
