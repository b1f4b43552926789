"""Evidence of a GPU run belongs to the source text it ran: a changed kernel needs a new record."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flashmla_cupy.ops import _select
from flashmla_cupy.runtime import source
from flashmla_cupy.runtime.spec import KernelSpec
from flashmla_cupy.testing import validate

RECORDS = Path(__file__).resolve().parents[1] / "records"
SPEC = KernelSpec("sched_meta", "sm80", (), (), "SchedMetaParams")


def test_every_selectable_kernel_has_a_passing_record_of_its_present_source():
    stale = validate.stale_kernels(RECORDS)
    assert not stale, (
        "; ".join(f"{name}: {why}" for name, why in stale.items())
        + ". On a GPU run: python cli.py validate --suite full --record tests/records/validate_h200.json"
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
    (folder / "validate_gpu.json").write_text(json.dumps({"kernels": rows}))


def test_a_missing_record_is_reported(tmp_path, one_spec):
    one_spec()
    assert validate.stale_kernels(tmp_path) == {SPEC.name: "no record"}


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
    assert validate.stale_kernels(tmp_path) == expected


def test_experimental_kernels_need_no_record(tmp_path, one_spec):
    one_spec(experimental=True)
    assert validate.stale_kernels(tmp_path) == {}
