"""Work model, rows and tables of the benchmark; nothing here is timed."""

from __future__ import annotations

import pytest
from rich.console import Console

from flashmla_cupy.errors import FlashMLAError
from flashmla_cupy.testing import bench, bench_cases, bench_data, peers, report, work_model
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
