"""Every command on a machine without a GPU: output, exit codes, one-line errors."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys

import pytest
from click.testing import CliRunner

from flashmla_cupy.errors import FlashMLAError
from flashmla_cupy.ops import _select, combine
from flashmla_cupy.runtime import cache as store
from flashmla_cupy.runtime import compile as runtime_compile
from flashmla_cupy.runtime import device, inspect
from flashmla_cupy.testing import bench, checks, environment, machine, report, terminal
from flashmla_cupy.testing.compare import Errors
from tests.common import REPO

CLI = runpy.run_path(str(REPO / "cli.py"), run_name="cli")


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch):
    monkeypatch.setattr(device, "gpu_available", lambda: False)


@pytest.fixture
def fake_compile(monkeypatch):
    """compile_cubin without NVRTC: the specs it was asked for."""
    asked = []

    def compile_cubin(spec, arch=None, *, use_cache=True):
        asked.append(spec)
        if spec.op == "combine" and fail:
            raise FlashMLAError(f"{spec.name}: cuda_src/combine/kernel_sm80.cuh:3: expected a ;")
        return runtime_compile.CompiledKernel(
            spec.name,
            spec.entry,
            arch or spec.arch,
            b"cubin",
            "log",
            inspect.Record(384, 1, 230_000, 256),
            inspect.Resources(168, 16, 0, 0, 0, 0),
            1.25,
            not use_cache,
        )

    fail = []
    monkeypatch.setattr(runtime_compile, "compile_cubin", compile_cubin)
    return asked, fail


def invoke(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(CLI["cli"], arguments, env={"COLUMNS": "200"})
    assert result.exit_code == code, result.output
    return result.output


@pytest.mark.parametrize(
    "command",
    [
        "",
        "validate",
        "bench",
        "kernels",
        "kernels list",
        "kernels compile",
        "kernels dump",
        "kernels watch",
        "schedule",
        "env",
        "cache",
        "cache info",
        "cache clear",
        "cache warmup",
    ],
)
def test_help(command):
    assert "Usage:" in invoke(*command.split(), "--help")


def test_validate_without_a_gpu_says_so_and_compiles(fake_compile, tmp_path):
    output = invoke("validate", "--op", "sched_meta", "--json", str(tmp_path / "v.json"))
    assert "No GPU was found" in output and "sched_meta.sm80" in output and "checks passed" in output
    assert "compiling the kernels of sched_meta" in output and "every kernel" not in output
    content = json.loads((tmp_path / "v.json").read_text())
    assert content["gpu"] is None and all(check["message"] is None and check["passed"] for check in content["checks"])
    count = len(content["checks"])
    assert content["summary"] == {"checks": count, "passed": count, "failed": 0}


def test_an_op_named_twice_is_validated_once(fake_compile, tmp_path):
    names = []
    for ops in (("combine",), ("combine", "combine")):
        path = tmp_path / f"{len(ops)}.json"
        invoke("validate", *(word for op in ops for word in ("--op", op)), "--json", str(path))
        names.append([result["name"] for result in json.loads(path.read_text())["checks"]])
    assert names[0] == names[1] and names[0]


def test_validate_smoke_runs_the_numpy_backend(fake_compile):
    output = invoke("validate", "--suite", "smoke")
    assert "compiling every kernel" in output
    assert "dense_decode" in output and "checks passed" in output and "FAILED" not in output


def test_validate_reports_failures_in_one_line_each(fake_compile, monkeypatch, tmp_path):
    def crash():
        raise RuntimeError("first line\nsecond line")

    rows = [
        checks.Check("combine", "good", lambda: Errors(0.5, 0.1)),
        checks.Check("combine", "crash", crash),
        checks.Check("combine", "wrong", lambda: Errors(3.0, 0.0, "out: error 3")),
    ]
    monkeypatch.setattr(checks, "collect", lambda ops, suite, machine: rows)
    output = invoke("validate", "--op", "combine", "--json", str(tmp_path / "v.json"), code=1)
    content = json.loads((tmp_path / "v.json").read_text())
    assert content["summary"] == {"checks": 3, "passed": 1, "failed": 2}
    assert [check["passed"] for check in content["checks"]] == [True, False, False]
    assert "FAILED combine: crash: RuntimeError: first line\n" in output and "out: error 3" in output
    assert "1 of 3 checks passed" in output and "second line" not in output


def test_validate_fails_when_a_kernel_does_not_compile(fake_compile):
    fake_compile[1].append(True)
    output = invoke("validate", "--op", "combine", code=1)
    assert "kernel_sm80.cuh:3" in output and "failed" in output
    assert "but not every kernel compiled" in output.splitlines()[-1]


def test_validate_refuses_a_record_without_a_gpu(tmp_path):
    assert "no GPU" in invoke("validate", "--record", str(tmp_path / "r.json"), code=1)


def test_bench_needs_a_gpu():
    assert invoke("bench", code=1).count("\n") == 1
    assert "case: got 'nothing'" in invoke("bench", "--case", "nothing", code=1)


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--op", "kv_quant", "--case", "nothing"), "case: got 'nothing', expected part of a name such as 'v32 bfloat"),
        (("--op", "kv_quant", "--crossover"), "--crossover: got --op kv_quant, expected sparse_decode"),
        (("--crossover",), "--crossover: got --op dense_decode, expected sparse_decode"),
        (("--codes",), "--codes: got --op dense_decode, expected sparse_decode"),
        (("--no-codes",), "--codes: got --op dense_decode, expected sparse_decode"),
        (("--op", "kv_quant", "--combine", "pairs"), "--combine: got --op kv_quant, expected dense_decode or sparse_"),
        (("--host", "--combine", "pairs"), "--combine: got it with --host, expected only one of the two"),
        (("--op", "sparse_decode", "--codes", "--crossover"), "--codes: got it with --crossover, expected only one"),
        (("--op", "sparse_decode", "--host", "--codes"), "--codes: got it with --host, expected only one of the two"),
        (("--host", "--case", "graph"), "--case: got it with --host, expected only one of the two"),
        (("--host", "--plot", "x.png"), "--plot: got it with --host, expected only one of the two"),
        (("--host", "--graph"), "--graph: got it with --host, expected only one of the two"),
        (("--host", "--repeats", "15"), "--repeats: got it with --host, expected only one of the two"),
        (("--host", "--peer-lib", "x.so"), "--peer-lib: got it with --host, expected only one of the two"),
        (("--op", "kv_quant", "--plot", "x.png"), "--plot: got a file, expected none with --op kv_quant"),
    ],
)
def test_bench_refuses(monkeypatch, arguments, message):
    monkeypatch.setattr(report, "check_picture", lambda option, path: None)
    assert message in invoke("bench", *arguments, code=1)


def test_bench_can_force_every_kernel_of_combine(monkeypatch):
    seen = []

    def measure(case, peers, **_):
        seen.append(combine._variant)
        return bench.Row(case, False, us={bench.OURS: 500.0})

    monkeypatch.setattr(machine, "detect", lambda: machine.Machine(None, True, "some GPU"))
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(environment, "versions", lambda machine: {})
    (option,) = (option for option in CLI["bench"].params if option.name == "merging")
    assert tuple(option.type.choices) == combine.VARIANTS
    for variant in combine.VARIANTS:
        invoke("bench", "--case", "graph 1,16,1,4096", "--combine", variant)
    assert seen == list(combine.VARIANTS) and combine._variant is None


def test_bench_of_cache_conversion(monkeypatch, tmp_path):
    def measure(case, peers, *, graph, repeats):
        return bench.Row(case, bool(graph), us={bench.OURS: 500.0}, copy_gbps=4000.0)

    monkeypatch.setattr(machine, "detect", lambda: machine.Machine(None, True, "some GPU"))
    monkeypatch.setattr(bench, "measure", measure)
    monkeypatch.setattr(environment, "versions", lambda machine: {})
    arguments = ("bench", "--op", "kv_quant", "--case", "d512", "--graph", "--json", str(tmp_path / "b.json"))
    output = invoke(*arguments)
    assert "Cache conversion" in output and "d512 float32 dequantize" in output and "0.84" in output
    rows = json.loads((tmp_path / "b.json").read_text())["rows"]
    assert len(rows) == 4 and all(row["graph"] and row["copy_gbps"] == 4000.0 for row in rows)
    assert rows[0]["copy_share"] == pytest.approx(0.843, abs=1e-3)
    assert "expected none with kv_quant" in invoke(*arguments, "--peer-lib", "x.so", code=1)


def test_kernels_list_counts_and_explains():
    output = invoke("kernels", "list")
    specs = _select.all_specs()
    assert f"{len(specs)} variants" in output and "because" in output
    assert all(spec.name in output for spec in specs)


def test_kernels_compile(fake_compile):
    asked, fail = fake_compile
    output = invoke("kernels", "compile", "bf16", "--fresh")
    assert asked and all("bf16" in spec.name for spec in asked)
    assert "168" in output and "230000" in output and "1.25" in output
    fail.append(True)
    assert "kernel_sm80.cuh:3" in invoke("kernels", "compile", "combine", code=1)
    for command in ("compile", "watch", "dump"):
        assert invoke("kernels", command, "nothing", code=1).startswith("Error: kernel: got 'nothing'")


def test_kernels_dump(fake_compile, monkeypatch, tmp_path):
    monkeypatch.setattr(runtime_compile, "ptx", lambda spec: "// ptx")
    monkeypatch.setattr(inspect, "sass", lambda cubin: "// sass")
    invoke("kernels", "dump", "sched_meta", "--to", str(tmp_path / "dump"))
    assert {path.suffix for path in (tmp_path / "dump").iterdir()} == {".cu", ".cubin", ".log", ".ptx", ".sass"}


def test_kernels_dump_goes_on_without_a_disassembler(fake_compile, monkeypatch, tmp_path):
    def missing(cubin):
        raise FlashMLAError("sass: neither nvdisasm nor cuobjdump found")

    monkeypatch.setattr(runtime_compile, "ptx", lambda spec: "// ptx")
    monkeypatch.setattr(inspect, "sass", missing)
    assert "neither nvdisasm" in invoke("kernels", "dump", "sched_meta", "--to", str(tmp_path))


def test_kernels_watch_compiles_what_changed(fake_compile, monkeypatch):
    from flashmla_cupy.runtime import source

    digests = iter("aab")
    current = {}
    monkeypatch.setattr(source, "digest", lambda spec: current["digest"])

    def next_round(seconds):
        current["digest"] = next(digests)

    next_round(0)
    monkeypatch.setattr("time.sleep", next_round)
    invoke("kernels", "watch", "sched_meta", "--rounds", "2")
    assert len(fake_compile[0]) == 1
    current["digest"] = "a"
    digests = iter("bb")
    invoke("kernels", "watch", "sched_meta", "--rounds", "2")
    assert len(fake_compile[0]) == 3


def test_schedule_draws_the_plan(tmp_path):
    pytest.importorskip("matplotlib")
    output = invoke("schedule", "--lengths", "4096x3,65,0", "--sm-count", "20", "--png", str(tmp_path / "plan.png"))
    assert "5 requests, 194 KV blocks over 10 SM parts" in output and "█" in output
    assert (tmp_path / "plan.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--lengths", "12,x"), "lengths: got 'x'"),
        (("--h-q", "10", "--h-kv", "3"), "h-kv: got 3"),
        (("--h-q", "65536", "--s-q", "65536"), "s-q: got 65536, expected s-q * h-q / h-kv = 4294967296 to be at most"),
        (("--lengths", "12", "--batch", "16"), "--batch: got a value, expected none with --lengths"),
        (("--lengths", "12", "--mean", "5"), "--mean: got a value, expected none with --lengths"),
        (("--varlen", "--lengths", "12"), "--varlen: got a value, expected none with --lengths"),
    ],
)
def test_schedule_refuses(arguments, message):
    assert message in invoke("schedule", *arguments, code=1)


def test_schedule_of_many_requests_fits_the_screen():
    lines = invoke("schedule", "--batch", "500", "--varlen", "--mean", "700").splitlines()
    assert len(lines) < 45 and max(map(len, lines[:-3])) <= 160


def test_env():
    facts = json.loads(invoke("env", "--json"))
    assert facts["gpu"] is None and len(facts["variables"]) == 8
    output = invoke("env")
    assert all(name in output for name in facts["variables"])


def test_cache_commands(fresh_runtime, monkeypatch, tmp_path):
    assert "0 kernels" in invoke("cache", "info")
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "old.kernel").write_bytes(b"x")
    assert "1 kernels" in invoke("cache", "info")
    assert "removed 1 kernels" in invoke("cache", "clear")
    monkeypatch.setattr(runtime_compile, "compile_cubin", lambda spec, **_: _raise(spec))
    output = invoke("cache", "warmup", "combine", "--experimental", code=1)
    assert "no compiler" in output and "failed" in output
    assert "experimental, add --experimental" in invoke("cache", "warmup", "crossover", code=1)
    monkeypatch.setattr(store, "info", lambda: store.CacheInfo(tmp_path, 0, 0, writable=False))
    assert "cannot be written" in invoke("cache", "warmup", "combine", code=1)


@pytest.mark.parametrize("name", ["-", ""])
def test_output_needs_the_name_of_a_file(name):
    assert "expected the name of a file" in invoke("validate", "--op", "combine", "--json", name, code=2)


def test_progress_without_a_terminal(monkeypatch, capsys):
    monkeypatch.setattr(terminal, "SECONDS_BETWEEN_LINES", 0)
    with terminal.progress(terminal.console(), "checks", 2) as advance:
        advance("one")
        advance("two")
    assert capsys.readouterr().err == "checks: 1 of 2\nchecks: 2 of 2\n"


def _raise(spec):
    raise FlashMLAError(f"{spec.name}: no compiler")


def test_from_a_checkout():
    done = subprocess.run([sys.executable, "cli.py", "--version"], cwd=REPO, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("flashmla_cupy ")


def test_detect_without_a_gpu():
    found = machine.detect()
    assert not found.gpu and found.sm_count == machine.H200_SM_COUNT and found.healthy()
