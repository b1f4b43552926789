"""Running checks and collecting evidence, with fakes in place of the GPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from flashmla_cupy.ops import _select
from flashmla_cupy.ops._select import all_specs
from flashmla_cupy.runtime import source
from flashmla_cupy.runtime.launch import Kernel
from flashmla_cupy.testing import checks, machine, report, trace, validate
from flashmla_cupy.testing.compare import Errors
from flashmla_cupy.testing.machine import HangError

SPEC = all_specs()[0]


class FakeMachine(machine.Machine):
    def healthy(self) -> bool:
        return not lost


lost: list[bool] = []


@pytest.fixture
def fake(monkeypatch):
    """A machine, and a kernel whose launch is recorded but goes nowhere."""
    lost.clear()
    launched = []
    monkeypatch.setattr(Kernel, "launch", lambda kernel, *args, **kwargs: launched.append(args))
    kernel = object.__new__(Kernel)
    kernel.spec = SPEC
    return FakeMachine(np, False, "fake"), kernel, launched


def test_worst_errors_per_kernel(fake, monkeypatch):
    gpu, kernel, launched = fake
    monkeypatch.setattr(_select, "all_specs", lambda: (replace(SPEC, experimental=False),))

    def check(errors):
        def run():
            kernel.launch((1, 1, 1), b"")
            return errors

        return run

    rows = [
        checks.Check("dense_decode", "a", check(Errors(0.5, 0.2))),
        checks.Check("dense_decode", "b", check(Errors(0.4, 0.7))),
        checks.Check("combine", "c", lambda: Errors(0.9, 0.9)),
    ]
    seen = []
    results = validate.run(rows, gpu, seen.append)
    assert seen == results and len(launched) == 2 and all(result.passed for result in results)
    assert validate.by_kernel(results) == {SPEC.name: {"cases": 2, "failed": 0, "worst_out": 0.5, "worst_lse": 0.7}}
    record = validate.record(results, "smoke", gpu)
    assert record["kernels"][SPEC.name]["evidence_digest"] == source.evidence_digest(SPEC)
    assert record["failed"] == 0 and record["nvrtc"]
    monkeypatch.setattr(_select, "all_specs", lambda: (replace(SPEC, experimental=True),))
    assert validate.record(results, "smoke", gpu)["kernels"] == {}


def test_a_lost_gpu_fails_what_follows(fake):
    gpu, *_ = fake

    def crash():
        lost.append(True)
        raise RuntimeError("an illegal memory access was encountered")

    rows = [checks.Check("combine", "crash", crash), checks.Check("combine", "after", lambda: Errors())]
    first, second = validate.run(rows, gpu)
    assert "illegal" in first.message and "not run" in second.message


def test_a_hang_names_its_check(fake):
    gpu, *_ = fake

    def hang():
        raise HangError("a kernel did not finish within 30 s")

    with pytest.raises(HangError, match="combine: stuck: a kernel"):
        validate.run([checks.Check("combine", "stuck", hang)], gpu)


def test_stubbed_launches_do_not_reach_the_gpu(fake):
    _, kernel, launched = fake
    with trace.launches(stub=True) as names:
        kernel.launch((1, 1, 1), b"", pdl=True)
    assert names == [SPEC.name] and not launched


def test_guard_and_nan_failures_are_seen_by_a_dense_check(monkeypatch):
    """A backend that leaves the last head unwritten, or writes outside the view, fails."""
    from flashmla_cupy.testing.cases import Case

    cpu, real = machine.Machine(np, False, "cpu"), checks.call
    case = Case((20,), h_q=4, out_layout="head_view")

    def unwritten(case, given):
        result = real(case, given)
        given.out.array[:, :, -1] = np.nan
        return result

    def outside(case, given):
        result = real(case, given)
        given.out.buffer[0, 0, 0, 0] = 0
        return result

    assert checks.dense(case, cpu).message is None
    monkeypatch.setattr(checks, "call", unwritten)
    assert "not finite" in checks.dense(case, cpu).message
    monkeypatch.setattr(checks, "call", outside)
    assert "outside the view" in checks.dense(case, cpu).message


def test_content_that_must_not_matter_is_noticed(monkeypatch):
    from flashmla_cupy.testing.cases import Case

    real = checks.call

    def leaky(case, given):
        result = real(case, given)
        if case.poison == "zero":
            given.out.array[0, 0, 0, 0] = 9
        return result

    monkeypatch.setattr(checks, "call", leaky)
    message = checks.dense(Case((20,), h_q=4, unchanged=True), machine.Machine(np, False, "cpu")).message
    assert "must not matter" in message


def test_plans_that_miss_or_repeat_blocks_are_noticed():
    lengths = np.array([200, 64], np.int32)
    good = np.array([[0, 0, 0, 3, 0, 1, 1, 0], [0, 3, 1, 1, 1, 1, 0, 0]], np.int32)
    splits = np.array([0, 2, 3], np.int32)
    assert checks._plan_covers(lengths, good, splits).message is None
    gap = good.copy()
    gap[1, 1] = 4
    assert "request 0" in checks._plan_covers(lengths, gap, splits).message
    assert "fragments" in checks._plan_covers(lengths, good, np.array([0, 1, 2], np.int32)).message


def test_schedule_spans():
    lengths = np.array([200, 0, 64], np.int32)
    metadata = np.array([[0, 0, 0, 3, 0, 1, 1, 0], [0, 3, 2, 1, 1, 1, 0, 0], [3, 0, 3, 0, 0, 0, 0, 0]], np.int32)
    assert report.schedule_spans(metadata, lengths) == [(0, 0, 3), (1, 0, 1), (1, 1, 0), (1, 2, 1)]
    summary = report.schedule_summary(metadata, np.array([0, 2, 3, 4]), lengths)
    assert "5 KV blocks over 3 SM parts" in summary and "1 requests split" in summary


def test_unknown_op_is_refused():
    with pytest.raises(ValueError, match="op: got 'sparse'"):
        checks.collect(("sparse",), "smoke", machine.Machine(np, False, "cpu"))


def test_a_gpu_checks_no_op_that_has_experimental_kernels_alone(monkeypatch):
    specs = (replace(SPEC, op="combine"), replace(SPEC, op="kv_quant", experimental=True))
    monkeypatch.setattr(_select, "all_specs", lambda: specs)
    gpu, cpu = FakeMachine(np, True, "fake"), FakeMachine(np, False, "fake")
    assert validate.runnable(("combine", "kv_quant"), gpu) == (["combine"], ["kv_quant"])
    assert validate.runnable(("combine", "kv_quant"), cpu) == (["combine", "kv_quant"], [])
    with _select.experimental_kernels():
        assert validate.runnable(("combine", "kv_quant"), gpu) == (["combine", "kv_quant"], [])
