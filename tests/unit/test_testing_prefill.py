"""Sparse prefill checks: suites, hostile inputs, scenarios, benchmark rows; on NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from flashmla_cupy.testing import (
    bench,
    bench_cases,
    checks,
    machine,
    peers,
    prefill_cases,
    prefill_checks,
    prefill_inputs,
    prefill_scenarios,
    report,
    validate,
    work_model,
)
from flashmla_cupy.testing.prefill_cases import PrefillCase

CPU = machine.Machine(np, False, "cpu")
SMALL = PrefillCase(9, 40, h_q=4, s_kv=60, invalid="random", length="random", requests="some", sink="mixed", seed=3)


# ---- suites
@pytest.mark.parametrize("name", sorted(prefill_cases.SUITES))
def test_names_are_unique(name):
    rows = prefill_cases.SUITES[name]()
    assert len({case.name for case in rows}) == len(rows)


def test_full_covers_every_option_and_bounds_the_work():
    rows = prefill_cases.full()
    assert len(rows) >= 800 and sum(case.keys for case in rows) < 30e6
    for field, options in (
        ("h_q", prefill_cases.HEADS), ("topk", prefill_cases.WIDTHS), ("s_kv", prefill_cases.ROWS),
        ("kv_layout", prefill_cases.KV_LAYOUTS), ("requests", prefill_cases.REQUESTS),
        ("invalid", prefill_cases.INVALID), ("invalid_value", (None, *prefill_cases.INVALID_VALUES)),
        ("length", prefill_cases.LENGTHS), ("sink", prefill_cases.SINKS), ("d_qk", (512, 576)),
        ("few_rows", (False, True)), ("s_q", (1, 2, 5, 64, 131, 132, 133)),
    ):
        for option in options:
            assert sum(getattr(case, field) == option for case in rows) > 8, (field, option)
    assert sum(case.topk > case.s_kv for case in rows) > 100
    assert max(case.keys for case in rows) <= 60_000


def test_full_is_deterministic():
    first = prefill_cases.full()
    prefill_cases.full.cache_clear()
    assert prefill_cases.full() == first


# ---- inputs
@pytest.mark.parametrize("kind", prefill_cases.KV_LAYOUTS)
@pytest.mark.parametrize("requests", prefill_cases.REQUESTS)
def test_only_rows_that_count_are_finite(kind, requests):
    case = replace(SMALL, kv_layout=kind, requests=requests)
    given = prefill_inputs.build(case)
    cu_q, cu_kv = ([0, 9], [0, 60]) if requests == "none" else (given.cu_seqlens_q, given.cu_seqlens_kv)
    counted = np.zeros(60, bool)
    for begin, end, first, last in zip(cu_q, cu_q[1:], cu_kv, cu_kv[1:], strict=False):
        for token in range(begin, end):
            row = given.indices[token, 0, : max(given.topk_length[token], 0)]
            counted[first + row[(row >= 0) & (row < last - first)]] = True
    finite = np.isfinite(given.kv.astype(np.float32))
    assert (finite.all(axis=(1, 2)) == counted).all() and not finite[~counted].any()
    assert counted.sum() < 60 and (counted.any() or requests == "empty")


def test_invalid_indices_are_of_every_kind():
    case = PrefillCase(3, 300, s_kv=50, invalid="all")
    assert set(prefill_inputs.build(case).indices.ravel().tolist()) == {-1, -2, -(2**31), 50, 51, 2**31 - 1}
    one = prefill_inputs.build(replace(case, invalid_value="capacity")).indices
    assert set(one.ravel().tolist()) == {50}


def test_variants_hold_the_same_keys():
    first = prefill_inputs.build(SMALL)
    wanted = prefill_checks.expected(SMALL, first, CPU)[0]
    for variant in SMALL.variants():
        got = prefill_checks.expected(variant, prefill_inputs.build(variant), CPU)[0]
        assert all(np.array_equal(x, y, equal_nan=True) for x, y in zip(got, wanted, strict=True)), variant.name


# ---- checks
def test_smoke_passes_on_numpy():
    results = validate.run(checks.collect(("sparse_prefill",), "smoke", CPU), CPU)
    assert len(results) > 12 and [r.message for r in results if not r.passed] == []


@pytest.mark.parametrize("scenario", [run for _, run in prefill_scenarios.collect("corner", CPU)])
def test_scenarios_pass_on_numpy(scenario):
    assert scenario(CPU).message is None


@pytest.mark.parametrize("which, name", [(0, "out"), (1, "max_logits"), (2, "lse")])
def test_a_wrong_result_is_found(which, name, monkeypatch):
    real = prefill_checks.call

    def broken(case, given, **changes):
        results = real(case, given, **changes)
        results[which][4] = results[which][4] + results[which].dtype.type(0.5)
        return results

    monkeypatch.setattr(prefill_checks, "call", broken)
    errors = prefill_checks.prefill(PrefillCase(9, 40, h_q=4, s_kv=60, seed=3), CPU)
    assert errors.message.startswith(f"{name}:") and "at (4, " in errors.message


def test_writes_outside_are_found(monkeypatch):
    def broken(case, given, **changes):
        given.lse.buffer[0, 0] = 0
        return tuple(guarded.array for guarded in given.outputs.values())

    monkeypatch.setattr(prefill_checks, "call", broken)
    errors = prefill_checks.prefill(replace(SMALL, out_layout="padded"), CPU)
    assert errors.message == "lse: elements outside the view were written"


# ---- benchmark rows
@pytest.mark.parametrize("case, us, tflops", list(zip(
    bench_cases.SPARSE_PREFILL, (3943, 4233, 4505, 2019, 655, 2073), (593, 552, 519, 579, 420, 531), strict=False)))
def test_work_model_gives_the_published_figures(case, us, tflops):
    assert work_model.of(case).tflops(us) == pytest.approx(tflops, rel=0.005)


def test_rows_and_peers():
    names = [case.name for case in bench_cases.select(None, "sparse_prefill")]
    assert len(set(names)) == 9 and "4096,32768,64,512 d512" in names and "4096,32768,8,2048" in names
    peer = peers.Peer("FlashMLA", lambda case, data: None)
    assert [len(peers.serving(case, [peer])) for case in bench_cases.SPARSE_PREFILL] == [1] * 6 + [0] * 3
    rows = [bench.Row(bench_cases.SPARSE_PREFILL[0], False, us={bench.OURS: 3900.0, "FlashMLA": 3943.0})]
    console = Console(width=120, record=True, file=open("/dev/null", "w"))
    console.print(report.bench_table(rows, ["FlashMLA"], "sparse_prefill"))
    assert "Sparse prefill" in (text := console.export_text()) and "1.011" in text
