"""Evidence of a GPU run belongs to the source text it ran: a changed kernel needs a new record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashmla_cupy.errors import KernelCompileError
from flashmla_cupy.ops import _select
from flashmla_cupy.runtime import compile as kernel_compile
from flashmla_cupy.runtime import source
from flashmla_cupy.runtime.spec import KernelSpec
from flashmla_cupy.testing import validate
from tests import with_cubins

RECORDS = Path(__file__).resolve().parents[1] / "records"
SPEC = KernelSpec("sched_meta", "sm80", (), (), "SchedMetaParams")


@pytest.mark.parametrize("nvrtc_major", [12, 13])
def test_every_selectable_kernel_has_a_passing_record_of_its_present_source(nvrtc_major):
    stale = validate.stale_kernels(RECORDS, nvrtc_major)
    assert not stale, (
        "; ".join(f"{name}: {why}" for name, why in stale.items())
        + f". On a GPU, with NVRTC {nvrtc_major} or cubins of it (tests/with_cubins.py), run: "
        + "python cli.py validate --suite full --record tests/records/validate_h200.json"
    )


@pytest.fixture
def one_spec(monkeypatch):
    def use(**changes):
        spec = KernelSpec(**{**vars(SPEC), **changes})
        monkeypatch.setattr(_select, "all_specs", lambda: (spec,))
        monkeypatch.setattr(source, "evidence_digest", lambda spec: "abc")
        return spec

    return use


def _write(folder: Path, **row) -> None:
    rows = {SPEC.name: {"evidence_digest": "abc", "cases": 3, "failed": 0, **row}}
    (folder / "validate_gpu.json").write_text(json.dumps({"nvrtc": "12.9", "kernels": rows}))


def test_a_missing_record_is_reported(tmp_path, one_spec):
    one_spec()
    assert validate.stale_kernels(tmp_path, 12) == {SPEC.name: "no record"}


@pytest.mark.parametrize(
    "row, expected",
    [
        ({}, {}),
        ({"evidence_digest": "old"}, {SPEC.name: "source changed since its record"}),
        ({"failed": 1}, {SPEC.name: "its record has failures"}),
    ],
)
def test_digest_and_failures_decide(tmp_path, one_spec, row, expected):
    one_spec()
    _write(tmp_path, **row)
    assert validate.stale_kernels(tmp_path, 12) == expected


def test_experimental_kernels_need_no_record(tmp_path, one_spec):
    one_spec(experimental=True)
    assert validate.stale_kernels(tmp_path, 12) == {}


def test_a_record_vouches_for_its_compiler_only(tmp_path, one_spec):
    one_spec()
    _write(tmp_path)
    assert validate.stale_kernels(tmp_path, 12) == {}
    assert validate.stale_kernels(tmp_path, 13) == {SPEC.name: "no record"}


def test_cubins_of_another_nvrtc_are_used_while_the_source_is_theirs(tmp_path, monkeypatch):
    assert with_cubins.build(tmp_path, "combine.sm80.fp32") == ["combine.sm80.fp32"]
    (spec,) = (spec for spec in _select.all_specs() if spec.name == "combine.sm80.fp32")
    index = json.loads((tmp_path / "index.json").read_text())
    (tmp_path / "index.json").write_text(json.dumps({**index, "nvrtc": [99, 1]}))
    expected = kernel_compile.compile_cubin(spec)
    with_cubins.use(tmp_path, monkeypatch.setattr)
    kernel_compile.forget()
    assert kernel_compile.nvrtc_version() == (99, 1)
    built = kernel_compile.compile_cubin(spec, use_cache=False)
    assert built.cubin == expected.cubin and built.registers == expected.registers
    monkeypatch.setattr(source, "digest", lambda spec: "changed")
    with pytest.raises(KernelCompileError, match="no CUBIN of its present source"):
        kernel_compile.compile_cubin(spec, use_cache=False)
