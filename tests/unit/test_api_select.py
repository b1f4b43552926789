"""Kernel selection: pure, and refusals say why."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_gpu import H200

from flashmla_cupy.errors import UnsupportedError
from flashmla_cupy.ops import _select
from flashmla_cupy.ops._select import Problem, all_specs, experimental_kernels, select

A100 = replace(H200, name="NVIDIA A100", compute_capability=(8, 0), arch="sm_80")
B200 = replace(H200, name="NVIDIA B200", compute_capability=(10, 0), arch="sm_100a")
V100 = replace(H200, name="Tesla V100", compute_capability=(7, 0), arch="sm_70")
DECODE = Problem("dense_decode", "bfloat16", 576, 512)


@pytest.fixture(autouse=True)
def experimental_too():
    with experimental_kernels():
        yield


def test_an_experimental_kernel_is_refused_unless_asked_for(monkeypatch):
    spec = replace(select(Problem("sched_meta"), H200), experimental=True)
    monkeypatch.setitem(_select._SCHED_META, ("", 0), spec)
    assert select(Problem("sched_meta"), H200) == spec
    monkeypatch.setattr(_select, "_experimental_allowed", False)
    with pytest.raises(UnsupportedError, match="sched_meta.sm80: experimental, no record of a passing validation"):
        select(Problem("sched_meta"), H200)
    with experimental_kernels():
        assert select(Problem("sched_meta"), H200) == spec


def test_every_variant_is_listed_once():
    assert len({spec.name for spec in all_specs()}) == len(all_specs())
    specs = {spec.name: spec for spec in all_specs() if spec.op in ("dense_decode", "combine", "sched_meta")}
    assert list(specs) == [
        *(f"dense_decode.{path}.{dtype}.{dims}" for path in ("sm90",) for dtype in ("bf16", "fp16")
          for dims in ("d576", "d512")),
        "combine.sm80.bf16", "combine.sm80.fp16", "combine.sm80.fp32", "combine.sm80.bf16.half",
        "combine.sm80.bf16.half.pairs", "combine.sm80.bf16.half.quarters", "sched_meta.sm80"]
    assert specs["dense_decode.sm90.bf16.d576"].config == ("bf16_t", "576", "fp16_t")
    assert specs["combine.sm80.fp32"].config == ("float",) and specs["sched_meta.sm80"].config == ()
    assert {spec.params for spec in specs.values()} == {"DenseDecodeParams", "CombineParams", "SchedMetaParams"}


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("d_qk", [576, 512])
def test_dense_decode_on_hopper(dtype, d_qk):
    assert select(Problem("dense_decode", dtype, d_qk, 512), H200) in all_specs()


def test_portable_kernels_are_compiled_for_the_device():
    assert select(Problem("combine", "float32", d_v=128), A100).arch == "sm_80"
    assert select(Problem("sched_meta"), B200).arch == "sm_100a"
    assert select(Problem("sched_meta"), H200) in all_specs()


@pytest.mark.parametrize("problem, device, reasons", [
    (DECODE, A100, ["compute capability: got 8.0, expected 9.x"]),
    (DECODE, B200, ["compute capability: got 10.0, expected 9.x"]),
    (Problem("dense_decode", "float32", 96, 64), H200, ["dtype: got float32", "d_qk: got 96", "d_v: got 64"]),
    (Problem("dense_decode", "float64", 576, 512), V100, ["got 7.0", "dtype: got float64"]),
    (Problem("combine", "int8", d_v=6), V100, ["got 7.0, expected 8.0 or higher", "got int8", "d_v: got 6"]),
    (Problem("sched_meta"), V100, ["got 7.0"]),
])
def test_refusals_list_every_reason_and_a_way_out(problem, device, reasons):
    with pytest.raises(UnsupportedError) as error:
        select(problem, device)
    assert len(error.value.reasons) == len(reasons) and "NumPy" in error.value.way_out
    assert device.name in str(error.value) and isinstance(error.value, NotImplementedError)
    for expected, reason in zip(reasons, error.value.reasons, strict=True):
        assert expected in reason


def test_unknown_op():
    with pytest.raises(ValueError, match="^op: got 'nothing', expected one of dense_decode"):
        select(Problem("nothing"), H200)
