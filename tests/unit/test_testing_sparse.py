"""Sparse decode and FP8 cache checks: suites, hostile inputs, the plain twins, benchmark rows; on NumPy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from flashmla_cupy.kv_format import FORMATS
from flashmla_cupy.reference import kv_quant
from flashmla_cupy.testing import (
    bench,
    bench_cases,
    checks,
    fp8_dense_cases,
    kv_quant_checks,
    machine,
    peers,
    plain_sparse,
    report,
    sparse_bench,
    sparse_cases,
    sparse_checks,
    sparse_inputs,
    sparse_scenarios,
    validate,
    work_model,
)
from flashmla_cupy.testing.bench_cases import SparseBenchCase
from flashmla_cupy.testing.sparse_cases import SparseCase

CPU = machine.Machine(np, False, "cpu")
SMALL = SparseCase(40, batch=3, h_q=4, s_q=2, invalid="random", length="random", extra_topk=10, sink="mixed", seed=3)


# ---- suites
@pytest.mark.parametrize("name", sorted(sparse_cases.SUITES))
def test_names_are_unique(name):
    rows = sparse_cases.SUITES[name]()
    assert len({case.name for case in rows}) == len(rows)


def test_full_covers_every_option_and_bounds_the_work():
    rows = sparse_cases.full()
    assert len(rows) >= 1500 and sum(case.keys for case in rows) < 20e6
    for field, options in (
        ("h_q", sparse_cases.HEADS), ("topk", sparse_cases.WIDTHS), ("page_size", sparse_cases.PAGE_SIZES),
        ("layout", sparse_cases.LAYOUTS), ("cache_layout", sparse_cases.CACHE_LAYOUTS),
        ("invalid", sparse_cases.INVALID), ("invalid_value", (None, *sparse_cases.INVALID_VALUES)),
        ("length", sparse_cases.LENGTHS), ("sink", sparse_cases.SINKS), ("scales", sparse_cases.SCALES),
        ("extra_length", sparse_cases.LENGTHS), ("with_metadata", (False, True)), ("s_q", (1, 2, 3, 4, 5, 8)),
        ("few_slots", (False, True)),
    ):
        for option in options:
            assert sum(getattr(case, field) == option for case in rows) > 8, (field, option)
    assert sum(case.extra_topk > 0 for case in rows) > 300
    assert max(case.keys for case in rows) < 40_000 and max(case.batch for case in rows) == 140


def test_full_is_deterministic():
    first = sparse_cases.full()
    sparse_cases.full.cache_clear()
    assert sparse_cases.full() == first
    with pytest.raises(ValueError, match="suite: got 'huge'"):
        sparse_cases.suite("huge")


# ---- inputs
def values_of(cache, case):
    """float64 (slots, d_qk)"""
    layout = FORMATS[case.layout]
    host = kv_quant.empty_cache(*cache.shape[:2], layout)
    host[...] = cache
    return kv_quant.dequantize(host, layout, dtype=np.float64).reshape(-1, layout.d_qk)


@pytest.mark.parametrize("layout", sparse_cases.LAYOUTS)
@pytest.mark.parametrize("kind", sparse_cases.CACHE_LAYOUTS)
@pytest.mark.parametrize("page_size", [48, 64])
def test_only_slots_that_count_are_finite(layout, kind, page_size):
    case = replace(SMALL, layout=layout, cache_layout=kind, page_size=page_size)
    given = sparse_inputs.build(case)
    for cache, indices, lengths in ((given.k_cache, given.indices, given.topk_length),
                                    (given.extra_k_cache, given.extra_indices, given.extra_topk_length)):
        capacity = cache.shape[0] * cache.shape[1]
        counted = np.zeros(capacity, bool)
        for request, rows in enumerate(indices):
            for row in rows:
                row = row if lengths is None else row[: max(lengths[request], 0)]
                counted[row[(row >= 0) & (row < capacity)]] = True
        finite = np.isfinite(values_of(cache, case))
        assert (finite.all(axis=1) == counted).all() and not finite[~counted].any()
        assert not counted[0] and not counted[-1] and 0 < counted.sum() < capacity


def test_invalid_indices_are_of_every_kind():
    case = SparseCase(500, invalid="all")
    values = {sparse_cases.invalid_value(name, 320) for name in sparse_cases.INVALID_VALUES}
    assert set(sparse_inputs.build(case).indices.ravel().tolist()) == values
    assert values == {-1, -2, -(2**31), 320, 321, 2**31 - 1}
    one = sparse_inputs.build(replace(case, invalid_value="capacity")).indices
    assert set(one.ravel().tolist()) == {320}


def test_variants_hold_the_same_keys():
    given = sparse_inputs.build(SMALL)
    named = given.indices[(given.indices >= 0) & (given.indices < 320)]
    finite = np.isfinite(values_of(given.k_cache, SMALL)).all(axis=1)
    named = named[finite[named]]
    variants = SMALL.variants()
    assert len(variants) == 3 + 3 + 6
    for variant in variants:
        other = sparse_inputs.build(variant)
        assert np.array_equal(values_of(other.k_cache, variant)[named], values_of(given.k_cache, SMALL)[named])
        assert np.array_equal(other.q.view(np.uint16), given.q.view(np.uint16))
        valid = (given.indices >= 0) & (given.indices < 320)
        assert np.array_equal(other.indices[valid], given.indices[valid])


@pytest.mark.parametrize("layout", sparse_cases.LAYOUTS)
@pytest.mark.parametrize("scales", sparse_cases.SCALES)
def test_keys_have_moderate_scores(layout, scales):
    """So that the softmax has something to weigh, and the budget of an lse means something."""
    case = SparseCase(300, layout=layout, scales=scales, h_q=8)
    given = sparse_inputs.build(case)
    keys = values_of(given.k_cache, case)[given.indices.ravel()]
    scores = given.q[0, 0].astype(np.float64) @ keys.T * case.d_qk**-0.5
    assert 0.3 < scores.std() < 12
    if scales == "spread":
        tiles = abs(keys[:, : FORMATS[layout].d_nope]).reshape(300, -1, FORMATS[layout].tile).max(axis=2)
        assert (tiles.max(axis=1) / tiles.min(axis=1) > 2**20).all()


def test_plain_tokens_equal_the_reference():
    for layout in sparse_cases.LAYOUTS:
        case = SparseCase(30, layout=layout, page_size=48, cache_layout="padded", scales="odd")
        cache, indices = (getattr(sparse_inputs.build(case), name) for name in ("k_cache", "indices"))
        for slot in indices.ravel().tolist():
            assert np.array_equal(plain_sparse.token(cache, slot, case.d_qk), values_of(cache, case)[slot])


# ---- checks
@pytest.mark.parametrize("case", sparse_cases.smoke(), ids=lambda case: case.name)
def test_smoke_on_the_numpy_backend(case):
    if case.scores <= 20_000:
        assert sparse_checks.sparse(case, CPU).message is None


@pytest.mark.parametrize("change, text", [
    (lambda case, given: given.out.array.__setitem__((..., 0), np.nan), "not finite"),
    (lambda case, given: given.lse.array.__iadd__(0.01), "lse"),
    (lambda case, given: given.out.buffer.__setitem__((0, 0, 0, 0), 0), "outside the view"),
    (lambda case, given: given.out.array.__setitem__((0, 0, 0, 0), 9.0), "x the allowed error"),
])
def test_wrong_results_are_noticed(monkeypatch, change, text):
    real = sparse_checks.call

    def broken(case, given, xp, *rest, **more):
        result = real(case, given, xp, *rest, **more)
        change(case, given)
        return result

    monkeypatch.setattr(sparse_checks, "call", broken)
    assert text in sparse_checks.sparse(SparseCase(20, h_q=4, out_layout="head_view"), CPU).message


@pytest.mark.parametrize("changes", [dict(poison="zero"), dict(cache_layout="offset"), dict(invalid_value="INT_MIN")])
def test_content_that_must_not_matter_is_noticed(monkeypatch, changes):
    real, (name, value) = sparse_checks.call, *changes.items()

    def leaky(case, given, xp, *rest, **more):
        result = real(case, given, xp, *rest, **more)
        if getattr(case, name) == value:
            given.out.array[0, 0, 0, 0] = 9
        return result

    monkeypatch.setattr(sparse_checks, "call", leaky)
    case = SparseCase(20, h_q=4, invalid="random", unchanged=True)
    assert "must not matter" in sparse_checks.sparse(case, CPU).message


def test_a_dropped_sink_or_length_is_noticed(monkeypatch):
    real = sparse_checks.call
    for name in ("attn_sink", "topk_length", "extra_k_cache"):
        gone = {"extra_k_cache": None, "extra_indices": None, "extra_topk_length": None, name: None}
        gone = gone if name == "extra_k_cache" else {name: None}
        monkeypatch.setattr(sparse_checks, "call", lambda case, given, xp, g=gone: real(case, given, xp, **g))
        case = SparseCase(40, batch=2, h_q=6, sink="mixed", length="one", extra_topk=30, poison="zero")
        assert sparse_checks.sparse(case, CPU).message is not None, name


@pytest.mark.parametrize("name, check", sparse_scenarios.collect("corner", CPU))
def test_scenarios_on_the_numpy_backend(name, check):
    assert check(CPU).message is None


def test_kv_quant_on_the_numpy_backend():
    rows = checks.collect(("kv_quant",), "full", CPU)
    assert len(rows) > 50
    failed = [result for result in validate.run(rows, CPU) if not result.passed]
    assert not failed, failed[0]


@pytest.mark.parametrize("part", ["codes", "scales", "rope", "outside"])
def test_wrong_caches_are_noticed(monkeypatch, part):
    real = kv_quant_checks.flashmla_cupy.quantize_kv_cache
    calls = []

    def broken(kv, *, out, **options):
        cache = real(kv, out=out, **options)
        calls.append(part)
        if len(calls) == 1:
            parts = kv_quant.parts_of(cache, FORMATS["v32"])
            if part == "outside":
                before = np.lib.stride_tricks.as_strided(cache, (cache.strides[0] + 1,), (1,))
                before[-2] = 0  # the byte ahead of the second page
            else:
                getattr(parts, part)[0, 1, 3] = 1
        return cache

    monkeypatch.setattr(kv_quant_checks.flashmla_cupy, "quantize_kv_cache", broken, raising=False)
    errors = kv_quant_checks.quantize(FORMATS["v32"], "bfloat16", 16, 20, "interleaved", False, CPU)
    assert ("outside" if part == "outside" else part) in errors.message


def test_ops_and_suites():
    assert set(checks.OPS) == {"sched_meta", "combine", "dense_decode", "kv_quant", "sparse_decode", "sparse_prefill"}
    smoke = checks.collect(("sparse_decode",), "smoke", machine.Machine(np, True, "fake"))
    assert len(smoke) == len(sparse_cases.smoke()) + len(fp8_dense_cases.smoke())
    assert {row.op for row in smoke} == {"sparse_decode"}
    full = sparse_checks.collect("full", machine.Machine(np, True, "fake"))
    assert len(full) == sum(len(rows.full()) + len(rows.corner()) for rows in (sparse_cases, fp8_dense_cases))


# ---- bench
@pytest.mark.parametrize("case, us, tflops", [
    (bench_cases.SPARSE_DECODE[0], 417.4, 350), (bench_cases.SPARSE_DECODE[1], 213.3, 342),
    (bench_cases.SPARSE_DECODE[2], 232.2, 315), (bench_cases.SPARSE_DECODE[3], 122.2, 299),
    (bench_cases.SPARSE_DECODE[4], 6067, 385), (bench_cases.SPARSE_DECODE[5], 95.1, 226),
    (bench_cases.SPARSE_DECODE[6], 242.5, 319), (bench_cases.SPARSE_DECODE[10], 43.8, 208),
], ids=lambda x: getattr(x, "name", None))
def test_work_model_gives_the_published_figures(case, us, tflops):
    assert work_model.of(case).tflops(us) == pytest.approx(tflops, rel=0.01)


def test_rows():
    rows = bench_cases.select(None, "sparse_decode")
    assert len({case.name for case in rows}) == len(rows) == len(bench_cases.SPARSE_DECODE) + 3 == 14
    assert [case.name for case in bench_cases.select("graph 1,", "sparse_decode")] == ["graph 1,128,1,2048"]
    assert [case.name for case in bench_cases.select("d512", "sparse_decode")] == [
        "128,64,2,128+512 d512", "128,128,2,128+1024 d512"]
    for case in bench_cases.SPARSE_DECODE:
        count = sparse_bench.cache_count(case, case.small)
        assert count == 1 or count * case.keys * 656 > 3 * 50e6
    with pytest.raises(ValueError, match="case: got 'x'"):
        bench_cases.select("x", "sparse_decode")


@pytest.mark.parametrize("case", [
    SparseBenchCase(2, 8, 2, 60, 100), SparseBenchCase(2, 8, 1, 60, 100, extra_topk=30, d_qk=512, page_size=256)])
def test_data_and_call_of_a_row(case, monkeypatch):
    """With NumPy in CuPy's place: the arrays make a valid call, every request names its own slots."""
    import sys

    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(sparse_bench, "_CACHES", (3, 3))
    data = sparse_bench.build(case, True)
    assert len(data.caches) == 3 and data.indices.shape == (2, case.s_q, 60)
    assert (data.indices[1] >= case.s_k).all() and (data.indices[0] < case.s_k).all()
    layout = {576: FORMATS["v32"], 512: FORMATS["d512"]}[case.d_qk]
    values = kv_quant.dequantize(data.caches[0], layout)
    assert np.isfinite(values).all() and 0.05 < values.std() < 0.2
    out = sparse_bench.ours(case, data)(1)
    assert out.shape == (2, case.s_q, 8, 512) and np.isfinite(out.astype(np.float32)).all()
    assert (out != 0).any()


def test_table(tmp_path):
    row = bench.Row(bench_cases.SPARSE_DECODE[0], False, us={bench.OURS: 300.0, "FlashMLA": 417.4})
    console = Console(width=160, record=True)
    console.print(report.bench_table([row], ["FlashMLA"], "sparse_decode"))
    text = console.export_text()
    assert "FP8" in text and "topk" in text and "1.391" in text and row.as_json()["tflops"][bench.OURS] > 400
    pytest.importorskip("matplotlib")
    report.roofline([row], tmp_path / "roof.png", "sparse_decode")
    assert (tmp_path / "roof.png").stat().st_size > 1000


def test_peers_are_chosen_by_op():
    assert set(peers._KNOWN) == set(bench_cases.ROWS)
    assert peers.load([], "sparse_decode") == []
