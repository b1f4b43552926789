"""Timing of the kernels: ours and the peers interleaved in one run, by CUDA events.

Large rows: the L2 is flushed before each call, median of the repetitions. Small rows: the time of one call inside a
CUDA graph that cycles through caches which together are many times the L2. Metadata and outputs are given to every
call and are not timed. A row of cache conversion has a plain copy, timed right after it, for comparison.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

import flashmla_cupy
from flashmla_cupy.errors import FlashMLAError
from flashmla_cupy.ops import _select
from flashmla_cupy.ops.dense_decode import mla_workspace_bytes
from flashmla_cupy.runtime import env
from flashmla_cupy.testing import bench_data, first_call, kv_quant_bench, prefill_bench, sparse_bench, trace, work_model
from flashmla_cupy.testing.bench_cases import AnyCase, BenchCase, KvQuantBenchCase, PrefillBenchCase, SparseBenchCase
from flashmla_cupy.testing.bench_data import BenchData
from flashmla_cupy.testing.peers import Peer, as_torch, serving

OURS = "flashmla_cupy"
_MODULES = {  # the other rows are dense decode
    SparseBenchCase: sparse_bench, PrefillBenchCase: prefill_bench, KvQuantBenchCase: kv_quant_bench
}
_FLUSH_BYTES = 512 << 20
_COPY_BYTES = 1 << 30
_SAME_RESULT = 0.02  # relative to the largest output; beyond it ours and a peer did not compute the same thing


@dataclass
class Row:
    """Medians in microseconds of one case; a peer that failed has an entry in `errors` instead."""

    case: AnyCase
    graph: bool
    us: dict[str, float] = field(default_factory=dict)
    spread: dict[str, tuple[float, float]] = field(default_factory=dict)  # fastest, slowest
    differences: dict[str, float] = field(default_factory=dict)  # peer: max |ours - peer| / max |peer|
    errors: dict[str, str] = field(default_factory=dict)
    copy_gbps: float | None = None  # of a device-to-device copy, where a row is compared with one

    @property
    def work(self) -> work_model.Work:
        return work_model.of(self.case)

    def ratio(self, peer: str) -> float | None:
        """How many times faster than the peer ours is."""
        if peer not in self.us or OURS not in self.us:
            return None
        return self.us[peer] / self.us[OURS]

    @property
    def copy_share(self) -> float | None:
        """GB/s of ours as a fraction of the copy's."""
        return None if self.copy_gbps is None else self.work.gbps(self.us[OURS]) / self.copy_gbps

    def as_json(self) -> dict[str, Any]:
        work = self.work
        return {
            "case": self.case.name,
            "graph": self.graph,
            "us": self.us,
            "spread_us": self.spread,
            "tflops": {name: work.tflops(us) for name, us in self.us.items()},
            "gbps": {name: work.gbps(us) for name, us in self.us.items()},
            "ratio": {name: self.ratio(name) for name in self.us if name != OURS},
            "difference": self.differences,
            "errors": self.errors,
            "copy_gbps": self.copy_gbps,
            "copy_share": self.copy_share,
        }


def measure(case: AnyCase, peers: list[Peer], *, graph: bool | None = None, repeats: int = 15) -> Row:
    """One row. graph None: small rows inside a CUDA graph, the others eager with a flushed L2."""
    in_graph = case.small if graph is None else graph
    row = Row(case, in_graph)
    peers = serving(case, peers)
    data = _build(case, in_graph)
    try:
        calls = _calls(case, data, peers, row)
        for peer in peers:
            _compare(row, peer.name, calls)
        times = _graph_times(calls, row, len(data.caches), repeats) if in_graph else _eager_times(calls, repeats)
        for name, values in times.items():
            row.us[name] = statistics.median(values)
            row.spread[name] = (min(values), max(values))
        if isinstance(case, KvQuantBenchCase):
            row.copy_gbps = _copy_gbps(repeats)
    finally:
        calls = data = None  # the arrays must be unreferenced before their memory can be handed back
        bench_data.release()
        if peers:
            _release_torch()
    return row


def _build(case: AnyCase, graph: bool) -> Any:
    return _MODULES.get(type(case), bench_data).build(case, graph)


def ours(case: AnyCase, data: Any) -> Callable[[int], Any]:
    """call(i): one call on cache i with metadata, outputs and workspace given, returning `out`."""
    return _MODULES[type(case)].ours(case, data) if type(case) in _MODULES else _ours_dense(case, data)


def _ours_dense(case: BenchCase, data: BenchData) -> Callable[[int], Any]:
    import cupy as cp

    plan = flashmla_cupy.get_mla_metadata(
        data.cache_seqlens, case.s_q * case.h_q // case.h_kv, case.h_kv, case.h_q, case.fp8, None
    )
    out = cp.empty((case.batch, case.s_q, case.h_q, case.d_v), data.q.dtype)
    lse = cp.empty((case.batch, case.h_q, case.s_q), np.float32)
    workspace = cp.empty(
        mla_workspace_bytes(case.batch, case.s_q, case.h_q, case.h_kv, int(plan[0].shape[0])), np.uint8
    )

    def call(i: int) -> Any:
        flashmla_cupy.flash_mla_with_kvcache(
            data.q,
            data.caches[i],
            data.block_table,
            data.cache_seqlens,
            case.d_v,
            *plan,
            case.causal,
            case.fp8,
            None,
            softmax_scale=data.scale,
            out=out,
            lse=lse,
            workspace=workspace,
        )
        return out

    return call


def _calls(case: AnyCase, data: Any, peers: list[Peer], row: Row) -> dict[str, Callable[[int], Any]]:
    calls = {OURS: ours(case, data)}
    calls[OURS](0)
    for peer in peers:
        try:
            call = peer.prepare(case, data)
            call(0)
            calls[peer.name] = call
        except (RuntimeError, TypeError, ValueError) as error:
            row.errors[peer.name] = str(error).strip().splitlines()[0]
    return calls


def _compare(row: Row, name: str, calls: dict[str, Callable[[int], Any]]) -> None:
    if name not in calls:
        return
    theirs, mine = calls[name](0).float(), as_torch(calls[OURS](0)).float()
    row.differences[name] = float((theirs - mine).abs().max() / theirs.abs().max())
    if not row.differences[name] <= _SAME_RESULT:
        row.errors[name] = f"its result differs from ours by {row.differences[name]:.3g} of the largest value"


def _eager_times(calls: dict[str, Callable[[int], Any]], repeats: int) -> dict[str, list[float]]:
    import cupy as cp

    flush = cp.empty(_FLUSH_BYTES, np.uint8)
    for call in calls.values():
        for _ in range(3):
            call(0)
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            flush.data.memset_async(0, _FLUSH_BYTES)
            times[name].append(_event_us(call, 0))
    return times


def _copy_gbps(repeats: int) -> float:
    """Bytes read and written by a plain device-to-device copy, per nanosecond."""
    import cupy as cp

    source, target = (cp.empty(_COPY_BYTES, np.uint8).data for _ in range(2))
    times = _eager_times({"copy": lambda i: target.copy_from_device_async(source, _COPY_BYTES)}, repeats)
    return work_model.Work(0.0, 2.0 * _COPY_BYTES).gbps(statistics.median(times["copy"]))


def _graph_times(calls: dict[str, Callable[[int], Any]], row: Row, count: int, repeats: int) -> dict[str, list[float]]:
    replays = {}
    for name, call in calls.items():
        try:
            replays[name] = (_capture_cupy if name == OURS else _capture_torch)(call, count)
        except RuntimeError as error:
            if name == OURS:
                raise
            row.errors[name] = str(error).strip().splitlines()[0]
    times: dict[str, list[float]] = {name: [] for name in replays}
    for replay in replays.values():
        replay()
    for _ in range(repeats):
        for name, replay in replays.items():
            times[name].append(_event_us(replay) / count)
    return times


def _event_us(run: Callable[..., Any], *arguments: Any) -> float:
    """GPU time of `run` on the default stream, in microseconds."""
    import cupy as cp

    start, end = cp.cuda.Event(), cp.cuda.Event()
    start.record()
    run(*arguments)
    end.record()
    end.synchronize()
    return cp.cuda.get_elapsed_time(start, end) * 1e3


def _capture_cupy(call: Callable[[int], Any], count: int) -> Callable[[], Any]:
    import cupy as cp

    cp.cuda.Device().synchronize()
    stream = cp.cuda.Stream(non_blocking=True)
    with stream:
        call(0)
        stream.synchronize()
        stream.begin_capture()
        for i in range(count):
            call(i)
        graph = stream.end_capture()
    return lambda: graph.launch(cp.cuda.Stream.null)


def _capture_torch(call: Callable[[int], Any], count: int) -> Callable[[], Any]:
    import torch

    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for i in range(min(3, count)):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(count):
            call(i)
    return graph.replay


def _release_torch() -> None:
    import gc

    import torch

    gc.collect()
    torch.cuda.empty_cache()


# ---- host time and first calls


@dataclass(frozen=True)
class HostCost:
    """Microseconds of host time of one eager call: all of it, and without its launches."""

    total_us: float
    without_launches_us: float
    launches: int
    kernels: tuple[str, ...]


def host_cost(case: AnyCase, calls: int = 2000) -> HostCost:
    """Host time of a call with metadata, out and workspace given; medians over batches that never fill the queue."""
    import cupy as cp

    call = ours(case, _build(case, False))
    call(0)
    cp.cuda.Device().synchronize()
    total = _host_us(call, calls)
    with trace.launches() as names:
        call(0)
    cp.cuda.Device().synchronize()
    with trace.launches(stub=True):
        without = _host_us(call, calls)
    call = None
    bench_data.release()
    return HostCost(total, without, len(names), tuple(names))


def _host_us(call: Callable[[int], Any], calls: int, batch: int = 50) -> float:
    import cupy as cp

    values = []
    for _ in range(max(1, calls // batch)):
        started = time.perf_counter()
        for _ in range(batch):
            call(0)
        values.append((time.perf_counter() - started) / batch * 1e6)
        cp.cuda.Device().synchronize()
    return statistics.median(values)


@dataclass(frozen=True)
class FirstCall:
    """Seconds in a fresh process. compile: per kernel. call: the op's first, from call to result on the GPU."""

    context_seconds: float
    call_seconds: float
    compile_seconds: dict[str, float]


def first_calls(op: str = "dense_decode") -> tuple[FirstCall, FirstCall]:
    """(cold, warm): a process with an empty cache, then one that finds the cubins. Raises FlashMLAError on failure.

    Experimental kernels run there where they do here.
    """
    flags = [first_call.EXPERIMENTAL] * _select.experimental_allowed()
    with tempfile.TemporaryDirectory(prefix="flashmla-cache-") as folder:
        # NVRTC 13 keeps a cache of its own, where the driver's lies.
        environment = {**os.environ, env.CACHE_DIR.name: folder, "CUDA_CACHE_PATH": folder}
        environment["PYTHONPATH"] = os.pathsep.join(p for p in (*sys.path, os.environ.get("PYTHONPATH")) if p)
        rows = []
        for _ in range(2):
            done = subprocess.run(
                [sys.executable, "-m", "flashmla_cupy.testing.first_call", op, *flags],
                capture_output=True,
                text=True,
                env=environment,
                timeout=300,
            )
            if done.returncode:
                raise FlashMLAError(f"first call: {(done.stderr.strip().splitlines() or ['no output'])[-1]}")
            rows.append(FirstCall(**json.loads(done.stdout.strip().splitlines()[-1])))
    return rows[0], rows[1]
