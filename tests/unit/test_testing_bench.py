"""Work model, rows and tables of the benchmark; nothing here is timed."""

from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
from rich.console import Console

from flashmla_cupy.errors import FlashMLAError
from flashmla_cupy.reference import kv_quant as reference
from flashmla_cupy.testing import bench, bench_cases, bench_data, kv_quant_bench, peers, report, work_model
from flashmla_cupy.testing.bench_cases import BenchCase


@pytest.mark.parametrize(
    "case, us, tflops, gbps",
    [
        (BenchCase(128, 128, 1, 4096), 260.8, 560, 2452),
        (BenchCase(128, 128, 2, 32768), 3544.3, 659, None),
        (BenchCase(128, 128, 1, 4096, varlen=True), 327.3, 448, None),
        (BenchCase(128, 16, 1, 32768), 1163.7, None, 4156),
        (BenchCase(128, 128, 2, 8192, causal=True), 1016.1, 575, None),
    ],
)
def test_work_model_gives_the_published_figures(case, us, tflops, gbps):
    work = work_model.dense_decode(case)
    assert tflops is None or work.tflops(us) == pytest.approx(tflops, rel=0.005)
    assert gbps is None or work.gbps(us) == pytest.approx(gbps, rel=0.005)


def test_rows():
    assert (len(bench_cases.LARGE), len(bench_cases.SMALL)) == (14, 10)
    names = [case.name for case in bench_cases.DENSE_DECODE]
    assert len(set(names)) == 24 and "128,128,1,4096 varlen" in names and "graph 1,128,1,512" in names
    assert all(case.small for case in bench_cases.select("graph"))
    with pytest.raises(ValueError, match="case: got 'x'"):
        bench_cases.select("x")


@pytest.mark.parametrize("case", bench_cases.SMALL, ids=lambda case: case.name)
def test_graph_rows_cycle_through_more_than_the_l2(case):
    count = bench_data.cache_count(case, graph=True)
    assert count * sum(case.lengths()) * 1152 > 3 * 50e6 and count >= 2
    assert bench_data.cache_count(case, graph=False) == 1


@pytest.fixture
def rows():
    good = bench.Row(
        bench_cases.LARGE[0], False, us={bench.OURS: 200.0, "FlashMLA": 260.0}, differences={"FlashMLA": 0.001}
    )
    bad = bench.Row(bench_cases.SMALL[0], True, us={bench.OURS: 12.0}, errors={"FlashMLA": "refused"})
    return [good, bad]


def test_ratio_and_json(rows):
    assert rows[0].ratio("FlashMLA") == 1.3 and rows[1].ratio("FlashMLA") is None
    content = rows[0].as_json()
    assert (
        content["ratio"] == {"FlashMLA": 1.3}
        and content["case"] == "128,128,1,4096"
        and content["tflops"][bench.OURS] > 700
    )


def test_table_and_roofline(rows, tmp_path):
    console = Console(width=160, record=True)
    console.print(report.bench_table(rows, ["FlashMLA"]))
    text = console.export_text()
    assert "1.300" in text and "failed" in text and "260.0" in text
    pytest.importorskip("matplotlib")
    report.roofline(rows, tmp_path / "roof.png")
    assert (tmp_path / "roof.png").stat().st_size > 1000
    with pytest.raises(FlashMLAError, match="not written"):
        report.roofline(rows, tmp_path / "missing" / "roof.png")


def test_host_line():
    cost = bench.HostCost(30.0, 12.5, 2, ("dense_decode.x", "combine.y"))
    assert "12.5 us beyond its 2 launches (dense_decode.x, combine.y)" in report.host_line(cost)


def test_peer_libraries_are_refused_readably(tmp_path):
    assert peers.load([]) == []
    pytest.importorskip("torch")
    with pytest.raises(FlashMLAError, match="no file"):
        peers.load([str(tmp_path / "missing.so")])
    wrong = tmp_path / "wrong.so"
    wrong.write_text("not a library")
    with pytest.raises(FlashMLAError, match="wrong.so"):
        peers.load([str(wrong)])


# ---- cache conversion
KV_QUANT = bench_cases.KV_QUANT


def test_rows_of_cache_conversion():
    assert [case.name for case in bench_cases.select("v32", "kv_quant")] == [
        "v32 bfloat16 quantize", "v32 bfloat16 dequantize", "v32 float32 quantize", "v32 float32 dequantize"]
    assert len({case.name for case in KV_QUANT}) == 8 and not any(case.small for case in KV_QUANT)
    assert [case.direction for case in bench_cases.select(" quantize", "kv_quant")] == ["quantize"] * 4


@pytest.mark.parametrize("case, us, gbps", list(zip(
    KV_QUANT, (521.7, 509.4, 761.9, 1045.3, 482.7, 460.4, 686.8, 792.2),
    (3634, 3722, 4074, 2969, 3493, 3662, 4018, 3484), strict=True)))
def test_work_of_cache_conversion_gives_the_published_figures(case, us, gbps):
    assert work_model.of(case).gbps(us) == pytest.approx(gbps, abs=0.5) and work_model.of(case).flop == 0


@pytest.mark.parametrize("case", KV_QUANT, ids=lambda case: case.name)
def test_data_and_call_of_cache_conversion(monkeypatch, case):
    """With NumPy in CuPy's place: each direction reads what the other writes, and writes into what is given."""
    monkeypatch.setitem(sys.modules, "cupy", np)
    case = replace(case, tokens=128)
    data = bench._build(case, False)
    (source,), kv_shape = data.caches, (2, 64, 1, case.format.d_qk)
    kv, cache = (source, data.out) if case.direction == "quantize" else (data.out, source)
    assert kv.shape == kv_shape and kv.dtype.name == case.dtype and 0.05 < kv.astype(np.float32).std() < 0.2
    assert cache.shape == (2, 64, 1, case.format.bytes_per_token)
    expected = reference.quantize(kv, case.format)
    if case.direction == "dequantize":
        expected = reference.dequantize(cache, case.format, dtype=kv.dtype)
    data.out[...] = 0
    assert bench.ours(case, data)(0) is data.out and np.array_equal(data.out, expected)


def test_a_row_of_cache_conversion_is_compared_with_a_copy(monkeypatch):
    """Of 1 GiB, read and written."""
    asked = []

    def eager_times(calls, repeats):
        asked.append(list(calls))
        return {name: [9000.0, 506.5, 1.0] if name == "copy" else [521.7] for name in calls}

    monkeypatch.setitem(sys.modules, "cupy", np)
    monkeypatch.setattr(bench, "_build", lambda case, graph: kv_quant_bench.KvQuantBenchData([None], None))
    monkeypatch.setattr(bench, "_calls", lambda case, data, peers, row: {bench.OURS: None})
    monkeypatch.setattr(bench, "_eager_times", eager_times)
    monkeypatch.setattr(bench_data, "release", lambda: None)
    row = bench.measure(KV_QUANT[0], [])
    assert asked == [[bench.OURS], ["copy"]]
    content = row.as_json()
    assert content["copy_gbps"] == pytest.approx(4240, abs=1)
    assert content["copy_share"] == pytest.approx(0.857, abs=1e-3)
    console = Console(width=160, record=True)
    console.print(report.bench_table([row], [], "kv_quant"))
    text = console.export_text()
    assert all(word in text for word in ("share", "521.7", "3634", "4240", "0.86")) and "TFLOP" not in text


def test_other_rows_have_no_copy(rows):
    assert rows[0].as_json()["copy_share"] is None
    console = Console(width=160, record=True)
    console.print(report.bench_table(rows, []))
    assert "share" not in console.export_text()


def test_cache_conversion_has_no_peers(tmp_path):
    with pytest.raises(FlashMLAError, match="peer-lib: got a library, expected none with kv_quant"):
        peers.load([str(tmp_path / "any.so")], "kv_quant")
