"""Dense decode over an FP8 cache: suites, hostile inputs, checks that notice what is wrong, bench rows; on NumPy."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from flashmla_cupy.kv_format import FORMATS
from flashmla_cupy.ops.sparse_decode import what_is_rounded, with_codes
from flashmla_cupy.reference import kv_quant, sparse_decode
from flashmla_cupy.reference._numerics import round_to
from flashmla_cupy.testing import (
    bench,
    bench_cases,
    bench_data,
    cases,
    fp8_dense_cases,
    fp8_dense_inputs,
    machine,
    peers,
    plain_sparse,
    report,
    sparse_cases,
    sparse_checks,
    sparse_scenarios,
    work_model,
)
from flashmla_cupy.testing.bench_cases import BenchCase
from flashmla_cupy.testing.cases import CONTIGUOUS
from flashmla_cupy.testing.fp8_dense_cases import Fp8DenseCase


class FakeGpu(machine.Machine):
    def wait(self, seconds: float = 30.0) -> None:
        pass


CPU, GPU = machine.Machine(np, False, "cpu"), FakeGpu(np, True, "fake")
SMALL = Fp8DenseCase((20, 0, 70), s_q=2, h_q=3, causal=True, unchanged=True, seed=5)


# ---- suites
@pytest.mark.parametrize("name", sorted(fp8_dense_cases.SUITES))
def test_names_are_unique_also_among_the_sparse_cases(name):
    rows = (*fp8_dense_cases.suite(name), *sparse_cases.suite(name))
    assert len({case.name for case in rows}) == len(rows)


def test_suites_have_their_size():
    sizes = {name: len(suite()) for name, suite in fp8_dense_cases.SUITES.items()}
    assert sizes == {"smoke": 6, "corner": 87, "full": 500}
    assert len(fp8_dense_cases.suite("full")) == 587


def test_full_covers_every_option_and_bounds_the_work():
    rows = fp8_dense_cases.full()
    for field, options in (
        ("h_q", sparse_cases.HEADS), ("page_size", (1, 16, 32, 48, 64, 128, 256, CONTIGUOUS)),
        ("s_q", (1, 2, 3, 4, 5, 8)), ("layout", sparse_cases.LAYOUTS), ("cache_layout", sparse_cases.CACHE_LAYOUTS),
        ("scales", sparse_cases.SCALES), ("causal", (False, True)), ("table", cases.TABLES),
        ("unused_entry", cases.UNUSED_ENTRIES), ("q_layout", cases.Q_LAYOUTS), ("out_layout", cases.Q_LAYOUTS),
        ("softmax_scale", (None, 0.01, cases.YARN_SCALE)), ("q_gain", (1.0, 6.0)), ("with_metadata", (False, True)),
        ("poison", ("nan", "code_nan", "large")),
    ):
        for option in options:
            assert sum(getattr(case, field) == option for case in rows) > 30, (field, option)
    for length in (0, 1, 20, 63, 64, 65, 140, 1000, 4096):
        assert sum(set(case.lengths) == {length} for case in rows) > 20, length
    assert sum(len(set(case.lengths)) > 1 for case in rows) > 100 and max(case.batch for case in rows) == 33
    assert max(case.keys for case in rows) <= 70_000 and max(case.scores for case in rows) <= 40e6
    assert sum(case.keys for case in rows) < 3e6


def test_full_is_deterministic():
    first = fp8_dense_cases.full()
    fp8_dense_cases.full.cache_clear()
    assert fp8_dense_cases.full() == first
    with pytest.raises(ValueError, match="suite: got 'huge'"):
        fp8_dense_cases.suite("huge")


def test_what_runs_without_a_gpu():
    names = [name for name, _ in sparse_checks.collect("corner", CPU) if name.startswith("dense")]
    assert 70 < len(names) < len(fp8_dense_cases.corner())
    for layout in sparse_cases.LAYOUTS:
        assert any(f" {layout} contiguous" in name for name in names)


# ---- inputs
def tokens_of(given, case):
    """float64 (pages, page_size, d_qk)"""
    layout = FORMATS[case.layout]
    host = kv_quant.empty_cache(*given.k_cache.shape[:2], layout)
    host[...] = given.k_cache
    return kv_quant.dequantize(host, layout, dtype=np.float64)[:, :, 0]


@pytest.mark.parametrize("layout", sparse_cases.LAYOUTS)
@pytest.mark.parametrize("kind", sparse_cases.CACHE_LAYOUTS)
@pytest.mark.parametrize("page_size", [1, 48, 64, CONTIGUOUS])
def test_only_tokens_of_a_request_are_finite(layout, kind, page_size):
    case = Fp8DenseCase((130, 0, 63, 1), layout=layout, cache_layout=kind, page_size=page_size, table="wide", seed=3)
    given = fp8_dense_inputs.build(case)
    values = np.isfinite(tokens_of(given, case))
    finite = values.all(axis=2)
    assert (values.any(axis=2) == finite).all() and finite.sum() == sum(case.lengths)
    keys = plain_sparse.keys_of_requests(given.k_cache, given.block_table, case.lengths, case.d_qk)
    assert all(np.isfinite(row[:length]).all() for row, length in zip(keys, case.lengths, strict=True))
    if page_size == CONTIGUOUS:
        assert given.block_table is None and given.k_cache.shape[:2] == (4, 130 + 37)
        assert (finite == (np.arange(167) < np.asarray(case.lengths)[:, None])).all()
    else:
        unused = np.concatenate([
            row[-(-length // page_size) :] for row, length in zip(given.block_table, case.lengths, strict=True)])
        assert (unused == -1).all() and len(unused) >= 4 * 5


def test_what_lies_between_the_pages_is_poison():
    case = Fp8DenseCase((70, 30), page_size=16, cache_layout="padded", poison="large")
    cache = fp8_dense_inputs.build(case).k_cache
    page_bytes = 16 * 656
    between = cache.strides[0] - page_bytes
    gaps = np.lib.stride_tricks.as_strided(cache[:, :1, :, :1], (len(cache), cache.strides[0]), (cache.strides[0], 1))
    assert between == 160 and (gaps[:-1, page_bytes:] == 0x7E).all()


@pytest.mark.parametrize("entry", cases.UNUSED_ENTRIES)
@pytest.mark.parametrize("table", cases.TABLES)
def test_unused_entries(entry, table):
    given = fp8_dense_inputs.build(Fp8DenseCase((65, 3), table=table, unused_entry=entry))
    assert given.block_table[1, 1] == (len(given.k_cache) if entry is None else entry)
    assert given.block_table.shape == (2, 7 if table == "wide" else 2)
    assert given.block_table.flags.c_contiguous == (table != "view")


def test_variants_hold_the_same_tokens():
    first = fp8_dense_inputs.build(SMALL)
    keys = plain_sparse.keys_of_requests(first.k_cache, first.block_table, SMALL.lengths, 576)
    variants = SMALL.variants()
    assert len(variants) == 3 + 3 + 7 and len(replace(SMALL, page_size=CONTIGUOUS).variants()) == 3 + 3
    for variant in variants:
        other = fp8_dense_inputs.build(variant)
        assert np.array_equal(other.q.view(np.uint16), first.q.view(np.uint16))
        assert np.array_equal(
            plain_sparse.keys_of_requests(other.k_cache, other.block_table, SMALL.lengths, 576), keys, equal_nan=True)


# ---- checks
@pytest.mark.parametrize("case", fp8_dense_cases.smoke(), ids=lambda case: case.name)
def test_smoke_on_the_numpy_backend(case):
    assert sparse_checks.dense(replace(case, unchanged=False), CPU).message is None


def test_empty_caches_on_the_numpy_backend():
    for case in fp8_dense_cases.corner()[:2]:
        assert set(case.lengths) == {0} and sparse_checks.dense(case, CPU).message is None


def broken(monkeypatch, change, module=sparse_checks):
    """After each call change(case, given)."""
    real = sparse_checks.call_dense

    def call(case, given, xp, **changes):
        result = real(case, given, xp, **changes)
        change(case, given)
        return result

    monkeypatch.setattr(module, "call_dense", call)


@pytest.mark.parametrize("change, text", [
    (lambda case, given: given.out.refill(), "not finite"),
    (lambda case, given: given.lse.refill(), "not finite"),
    (lambda case, given: given.lse.array.__iadd__(0.01), "lse"),
    (lambda case, given: given.out.buffer.__setitem__((0, 0, 0, 0), 0), "outside the view"),
    (lambda case, given: given.out.array.__setitem__((0, 0, 0, 0), 9.0), "x the allowed error"),
])
def test_wrong_results_are_noticed(monkeypatch, change, text):
    broken(monkeypatch, change)
    assert text in sparse_checks.dense(Fp8DenseCase((20, 3), h_q=4, out_layout="head_view"), CPU).message


@pytest.mark.parametrize("changes", [
    dict(poison="zero"), dict(cache_layout="offset"), dict(unused_entry=2147480000), dict(table="wide")])
def test_content_that_must_not_matter_is_noticed(monkeypatch, changes):
    name, value = next(iter(changes.items()))

    def leak(case, given):
        if getattr(case, name) == value:
            given.out.array[0, 0, 0, 0] = 9

    broken(monkeypatch, leak)
    message = sparse_checks.dense(SMALL, CPU).message
    assert "must not matter" in message and f"{name}={value}" in message


@pytest.mark.parametrize("wrong", [dict(causal=False), dict(softmax_scale=0.05), dict(lengths=(20, 0, 69))])
def test_a_wrong_mask_scale_or_length_is_noticed(monkeypatch, wrong):
    real = sparse_checks.call_dense

    def call(case, given, xp):
        lengths = np.asarray(wrong.get("lengths", case.lengths), np.int32)
        return real(replace(case, **wrong), given, xp, cache_seqlens=lengths)

    monkeypatch.setattr(sparse_checks, "call_dense", call)
    assert sparse_checks.dense(replace(SMALL, unchanged=False, poison="zero"), CPU).message is not None


@pytest.mark.parametrize("h_q, codes, rounds", [(8, True, "nothing"), (9, False, "keys"), (9, True, "scores")])
def test_references_of_a_kernel(h_q, codes, rounds):
    """As for a kernel with indices: out against exact keys, lse against those that the kernel multiplies."""
    case = replace(SMALL, h_q=h_q)
    given = fp8_dense_inputs.build(case)
    with with_codes(codes):
        assert what_is_rounded(False, case.s_q * h_q, case.d_qk) == rounds
        (out, lse), rounded = sparse_checks.expected_dense(case, given, GPU)
    plain, same = sparse_checks.expected_dense(case, given, CPU)
    assert np.allclose(out, plain[0], rtol=1e-12, atol=1e-12) and not np.array_equal(rounded[0], same[0])
    assert np.allclose(lse, plain[1], rtol=1e-12, atol=1e-12) is (rounds != "keys")
    assert np.array_equal(lse, rounded[1]) is (rounds != "scores")
    assert np.array_equal(round_to(rounded[0], given.q.dtype), same[0])  # a kernel's is rounded by the budget


# ---- pages that the cache does not have
def zeros_for_missing_pages(case, given, xp, *, k_cache, block_table):
    """Keys of zeros instead of none."""
    missing = (block_table < 0) | (block_table >= len(k_cache))
    return best_kernel(case, given, xp, k_cache=np.concatenate([k_cache, np.zeros_like(k_cache[:1])]),
                       block_table=np.where(missing, len(k_cache), block_table))


def best_kernel(case, given, xp, *, k_cache, block_table):
    """Missing pages are left out; rounds as little as the kernel that the case gets can."""
    positions = np.arange(max(case.lengths))
    slots = block_table.astype(np.int64)[:, positions // case.page_size] * case.page_size + positions % case.page_size
    indices = np.full((case.batch, case.s_q, len(positions)), -1)
    for request, length in enumerate(case.lengths):
        for token in range(case.s_q):
            count = max(0, length - case.s_q + token + 1) if case.causal else length
            indices[request, token, :count] = slots[request, :count]
    out, lse = sparse_decode.attend(given.q, k_cache, indices, mode="rounded")
    if what_is_rounded(False, case.s_q * case.h_q, case.d_qk) != "keys":
        _, lse = sparse_decode.attend(given.q, k_cache, indices, mode="exact")
    given.out.array[...], given.lse.array[...] = out.astype(given.out.dtype), lse
    return given.out.array, given.lse.array


def test_missing_pages(monkeypatch):
    lengths = (100, 65, 130, 0, 5)
    monkeypatch.setattr(sparse_scenarios, "call_dense", best_kernel)
    right = sparse_scenarios.missing_pages(GPU, lengths)
    assert right.message is None and 0.3 < right.out < 1
    assert "the pages were accepted" in sparse_scenarios.missing_pages(CPU, lengths).message
    monkeypatch.setattr(sparse_scenarios, "call_dense", zeros_for_missing_pages)
    assert "page 64 v32" in sparse_scenarios.missing_pages(GPU, lengths).message


# ---- bench
def test_rows():
    rows = bench_cases.select("dense", "sparse_decode")
    assert [case.name for case in rows] == ["dense 128,128,1,8192", "dense 128,16,1,8192", "dense 128,64,1,8192"]
    assert not any(case.small for case in rows) and not bench_cases.ROWS["sparse_decode"][0].name.startswith("dense")
    for case in rows:
        bf16 = replace(case, fp8=False)
        assert bf16 in bench_cases.DENSE_DECODE and case.name == f"dense {bf16.name}"
        assert case.lengths() == bf16.lengths() and bench_data.cache_count(case, True) == 2


@pytest.mark.parametrize("case", bench_cases.FP8_DENSE, ids=lambda case: case.name)
def test_work_model(case):
    work, bf16 = work_model.of(case), work_model.of(replace(case, fp8=False))
    assert work.flop == bf16.flop == 2 * 128 * case.h_q * 8192 * (576 + 512)
    assert work.byte == 128 * (8192 * 656 + case.h_q * (576 + 512) * 2)
    assert bf16.byte - work.byte == 128 * 8192 * (1152 - 656)


def test_data_and_call_of_a_row(monkeypatch):
    """With NumPy in CuPy's place: the arrays make a valid call, on the same queries and pages as in bf16."""
    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(bench_data, "cache_count", lambda case, graph: 2)
    case = BenchCase(2, 8, 1, 100, fp8=True)
    data, bf16 = bench_data.build(case, True), bench_data.build(replace(case, fp8=False), True)
    assert [cache.shape for cache in data.caches] == [(4, 64, 1, 656)] * 2 and data.caches[0].dtype == np.uint8
    assert np.array_equal(data.block_table, bf16.block_table) and np.array_equal(data.q, bf16.q)
    values = kv_quant.dequantize(data.caches[0], FORMATS["v32"])
    assert np.isfinite(values).all() and 0.05 < values.std() < 0.2
    out = bench.ours(case, data)(1)
    exact, _ = sparse_decode.attend_paged(data.q, data.caches[1], data.block_table, data.cache_seqlens)
    assert out.shape == (2, 1, 8, 512) and np.allclose(out.astype(np.float64), exact, rtol=0.01, atol=1e-3)


def test_peers_are_left_out():
    rival = peers.Peer("FlashMLA", lambda case, data: pytest.fail("asked"))
    assert peers.serving(bench_cases.FP8_DENSE[0], [rival]) == []
    for case in (bench_cases.SPARSE_DECODE[0], bench_cases.DENSE_DECODE[0]):
        assert peers.serving(case, [rival]) == [rival]
    row = bench.Row(bench_cases.FP8_DENSE[0], False, us={bench.OURS: 500.0})
    console = Console(width=160, record=True)
    console.print(report.bench_table([row], ["FlashMLA"], "sparse_decode"))
    text = console.export_text()
    assert "dense 128,128,1,8192" in text and "failed" not in text
    assert row.as_json()["ratio"] == {} and row.as_json()["errors"] == {}


def test_a_row_is_measured_without_peers(monkeypatch):
    asked = []
    monkeypatch.setattr(bench, "_build", lambda case, graph: bench_data.BenchData(None, [None], None, None, 1.0))
    monkeypatch.setattr(bench, "_calls", lambda case, data, peers, row: asked.append(peers) or {bench.OURS: None})
    monkeypatch.setattr(bench, "_eager_times", lambda calls, repeats: {name: [1.0] for name in calls})
    monkeypatch.setattr(bench_data, "release", lambda: None)
    row = bench.measure(bench_cases.FP8_DENSE[0], [peers.Peer("FlashMLA", lambda case, data: None)])
    assert asked == [[]] and row.us == {bench.OURS: 1.0} and not row.errors
