"""The kernels' own text, run on the CPU behind the public API and compared with the references: addresses, layouts,
roles, barriers and plans, everything but timing. See tests/sim."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import cupy
import ml_dtypes
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "sim"))
import simulator  # noqa: E402

from flashmla_cupy import (  # noqa: E402
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
    merge_states,
)
from flashmla_cupy.kv_format import D512, V32  # noqa: E402
from flashmla_cupy.ops import _device, _plans, _select, combine, sched_meta  # noqa: E402
from flashmla_cupy.ops import sparse_decode as sparse_decode_op  # noqa: E402
from flashmla_cupy.reference import combine as reference_combine  # noqa: E402
from flashmla_cupy.reference import dense_decode as reference_dense  # noqa: E402
from flashmla_cupy.reference import kv_quant, sparse_decode, sparse_prefill  # noqa: E402
from flashmla_cupy.reference import sched_meta as reference_plan  # noqa: E402
from flashmla_cupy.runtime import compile as kernel_compile  # noqa: E402
from flashmla_cupy.runtime import device, tensor_map  # noqa: E402
from flashmla_cupy.runtime.device import DeviceInfo  # noqa: E402
from flashmla_cupy.testing import prefill_checks, prefill_inputs  # noqa: E402
from flashmla_cupy.testing.compare import Errors, compare  # noqa: E402
from flashmla_cupy.testing.machine import Machine  # noqa: E402
from flashmla_cupy.testing.prefill_cases import PrefillCase  # noqa: E402

pytestmark = pytest.mark.skipif(simulator.COMPILER is None, reason="no g++ to compile the simulated kernels with")
BF16, FP16 = np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16)
SMS = 6  # few parts, so that small requests are split


@pytest.fixture(scope="module")
def libraries(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("simulated")


@pytest.fixture
def gpu(libraries, monkeypatch, request):
    """Memory whose arrays the public API takes for those of a GPU with SMS multiprocessors.

    Param: whether experimental kernels run, by default they do.
    """
    experimental = getattr(request, "param", True)
    memory = simulator.Memory()
    info = DeviceInfo("simulated", (9, 0), "sm_90a", SMS, 232448)

    def contiguous(x, dtype=None):
        return memory.put(np.ascontiguousarray(simulator.host(x), dtype))

    def assign(target, source):
        simulator.host(target)[...] = simulator.host(source) if isinstance(source, cupy.ndarray) else source

    for target, name, value in (
        (_device, "current_device", lambda: 0), (_device, "current_stream_ptr", lambda: 0),
        (_device, "on_device", lambda device_id: contextlib.nullcontext()), (_device, "info", lambda device_id: info),
        (_device, "contiguous", contiguous), (_device, "assign", assign), (tensor_map, "encode", simulator.encode),
        (device, "is_capturing", lambda stream: False),
        (kernel_compile, "get_kernel", lambda spec: simulator.kernel(spec, libraries)),
    ):
        monkeypatch.setattr(target, name, value)
    _plans.clear_plans(), sched_meta._template.cache_clear(), combine._direct.cache_clear()
    with cupy.cuda.using_allocator(memory.alloc), contextlib.ExitStack() as stack:
        if experimental:
            stack.enter_context(_select.experimental_kernels())
        yield memory
    _plans.clear_plans()


@pytest.fixture
def few_rows_alone(monkeypatch):
    """Of the FP8 decode kernels only those for few rows are there, each for the calls that it serves."""
    for op in ("indices", "paged"):
        monkeypatch.delitem(_select._CHOICES, f"sparse_decode.{op}")


def normal(rng, shape, dtype):
    return rng.standard_normal(shape).astype(np.float32).astype(dtype)


def paged_cache(rng, lengths, page_size, h_kv, d_qk, dtype):
    """A cache and its block table; what no request uses is NaN, or an entry that points nowhere."""
    pages = [-(-length // page_size) for length in lengths]
    cache = normal(rng, (sum(pages) + 2, page_size, h_kv, d_qk), dtype)
    order = rng.permutation(len(cache))
    table = np.full((len(lengths), max(pages) + 2), 2147480000, np.int32)
    used = 0
    for request, (length, count) in enumerate(zip(lengths, pages, strict=True)):
        table[request, :count] = order[used:used + count]
        used += count
        if length % page_size:
            cache[table[request, count - 1], length % page_size:] = np.nan
    cache[order[used:]] = np.nan
    return cache, table


DENSE = {  # lengths, s_q, h_q, h_kv, d_qk, dtype, page size (0: contiguous), causal
    "one block": ((64,), 1, 16, 1, 576, BF16, 64, False),
    "split, tails": ((130, 1, 300), 1, 64, 1, 576, BF16, 64, False),
    "empty rows, small pages, causal": ((0, 65, 2), 3, 40, 1, 576, BF16, 16, True),
    "two row blocks, KV heads": ((200, 70), 5, 54, 2, 576, BF16, 32, True),
    "fp16, large pages": ((140, 257), 2, 9, 3, 576, FP16, 256, True),
    "d_qk 512": ((100, 64), 1, 70, 1, 512, BF16, 128, False),
    "d_qk 512, fp16, contiguous": ((90, 31), 2, 8, 1, 512, FP16, 0, True),
}


@pytest.mark.parametrize("case", DENSE.values(), ids=list(DENSE))
def test_dense_decode(gpu, case):
    lengths, s_q, h_q, h_kv, d_qk, dtype, page_size, causal = case
    rng = np.random.default_rng(1)
    q = normal(rng, (len(lengths), s_q, h_q, d_qk), dtype)
    if page_size:
        cache, table = paged_cache(rng, lengths, page_size, h_kv, d_qk, dtype)
    else:
        cache, table = normal(rng, (len(lengths), max(lengths), h_kv, d_qk), dtype), None
        for request, length in enumerate(lengths):
            cache[request, length:] = np.nan
    lengths = np.array(lengths, np.int32)
    device_table = None if table is None else gpu.put(table)
    out, lse = flash_mla_with_kvcache(gpu.put(q), gpu.put(cache), device_table, gpu.put(lengths), 512, causal=causal)
    references = [reference_dense.attend(q, cache, table, lengths, 512, causal=causal, mode=mode)
                  for mode in ("exact", "rounded")]
    errors = compare(simulator.host(out), simulator.host(lse), *references)
    assert errors.message is None, errors.message


def test_metadata_of_other_lengths(gpu):
    lengths = np.array([200, 0, 90], np.int32)
    rng = np.random.default_rng(2)
    q = normal(rng, (3, 1, 16, 576), BF16)
    cache, table = paged_cache(rng, lengths.tolist(), 64, 1, 576, BF16)
    arrays = [gpu.put(x) for x in (q, cache, table, lengths)]
    expected = [simulator.host(x).copy() for x in flash_mla_with_kvcache(*arrays, 512)]
    for other in ((1, 1, 1), (0, 500, 0), (64, 64, 2000)):
        metadata = get_mla_metadata(gpu.put(np.array(other, np.int32)), 16, 1, 16)
        out, lse = (simulator.host(x) for x in flash_mla_with_kvcache(*arrays, 512, *metadata))
        assert np.abs(out.astype(np.float32) - expected[0].astype(np.float32)).max() < 0.03
        assert np.allclose(lse, expected[1], atol=1e-5)


def test_one_block_of_combine_merges_several_requests(gpu, monkeypatch):
    lengths = [300, 70, 410, 290]
    rng = np.random.default_rng(3)
    q = normal(rng, (len(lengths), 1, 16, 576), BF16)
    cache, table = paged_cache(rng, lengths, 64, 1, 576, BF16)
    lengths = np.array(lengths, np.int32)
    _, num_splits = reference_plan.plan(lengths, SMS, overhead_blocks=sched_meta.overhead_blocks(4, SMS, False))
    assert (np.diff(num_splits) > 1).sum() >= 2
    shape = combine.shape
    monkeypatch.setattr(combine, "shape", lambda rows, requests, *others: shape(rows, 1, *others))
    out, lse = flash_mla_with_kvcache(*(gpu.put(x) for x in (q, cache, table, lengths)), 512)
    references = [reference_dense.attend(q, cache, table, lengths, 512, mode=mode) for mode in ("exact", "rounded")]
    errors = compare(simulator.host(out), simulator.host(lse), *references)
    assert errors.message is None, errors.message


@pytest.mark.parametrize("dtype, shape", [
    *((dtype, shape) for dtype in (BF16, FP16) for shape in ((1, 1, 1, 1), (1, 2, 2, 2), (3, 1, 16, 2), (2, 2, 4, 1))),
    *((BF16, shape) for shape in ((1, 1, 1, 1, "pairs"), (2, 2, 1, 1, "pairs"), (1, 2, 1, 4, "quarters"),
                                  (3, 1, 16, 4, "quarters")))], ids=str)
def test_every_shape_of_combine(gpu, monkeypatch, shape, dtype):
    """Row groups, requests, warps a row, column groups, variant; columns of very different size, h_kv 2."""
    monkeypatch.setattr(combine, "shape", lambda *sizes: combine.Shape(*shape))
    lengths, rng = [700, 20, 530], np.random.default_rng(5)
    q = normal(rng, (len(lengths), 3, 14, 576), dtype)
    cache, table = paged_cache(rng, lengths, 64, 2, 576, dtype)
    cache = (cache.astype(np.float32) * np.where(np.arange(576) < 256, 1, 16) * 0.1).astype(dtype)
    lengths = np.array(lengths, np.int32)
    out, lse = flash_mla_with_kvcache(*(gpu.put(x) for x in (q, cache, table, lengths)), 512)
    references = [reference_dense.attend(q, cache, table, lengths, 512, mode=mode) for mode in ("exact", "rounded")]
    for columns in (slice(0, 256), slice(256, 512)):
        halves = [(exact[..., columns], exact_lse) for exact, exact_lse in references]
        errors = compare(simulator.host(out)[..., columns], simulator.host(lse), *halves)
        assert errors.message is None, errors.message


def test_tiny_outputs_of_split_requests_keep_their_bits(gpu):
    rng = np.random.default_rng(6)
    q, lengths = normal(rng, (1, 1, 4, 576), BF16), np.array([500], np.int32)
    cache, table = paged_cache(rng, [500], 64, 1, 576, BF16)
    cache = (cache.astype(np.float32) * 1e-36).astype(BF16)
    out, lse = flash_mla_with_kvcache(*(gpu.put(x) for x in (q, cache, table, lengths)), 512)
    references = [reference_dense.attend(q, cache, table, lengths, 512, mode=mode) for mode in ("exact", "rounded")]
    errors = compare(simulator.host(out), simulator.host(lse), *references)
    assert errors.message is None, errors.message


SPARSE = {  # layout, batch, s_q, h_q, topk, extra topk
    "one block": (V32, 1, 1, 16, 64, 0),
    "split": (V32, 2, 1, 64, 300, 0),
    "two lists, two head blocks": (V32, 2, 2, 70, 70, 50),
    "two lists, crossover": (V32, 2, 2, 70, 70, 50),
    "split, crossover": (V32, 2, 1, 128, 300, 0),
    "three head blocks": (V32, 1, 1, 130, 65, 0),
    "ue8m0 scales, crossover": (D512, 2, 1, 66, 133, 0),
    "ue8m0 scales, two lists": (D512, 3, 1, 8, 6, 64),
    "whole requests, two a part": (V32, 7, 1, 40, 150, 0),
}


@pytest.fixture(params=["bf16", "codes"])
def kernel_of(request):
    """The kernel of the FP8 decode that a case gets: with the crossover if its name says so."""
    if "crossover" in request.node.name and request.param == "codes":
        pytest.skip("the kernel that multiplies codes has no crossover")
    crossover = sparse_decode_op.with_crossover() if "crossover" in request.node.name else contextlib.nullcontext()
    with crossover, sparse_decode_op.with_codes(request.param == "codes"):
        yield


@pytest.mark.parametrize("sink", [False, True], ids=["", "sink"])
@pytest.mark.parametrize("case", SPARSE.values(), ids=list(SPARSE))
def test_sparse_decode(gpu, kernel_of, case, sink):
    layout, batch, s_q, h_q, topk, extra = case
    rng = np.random.default_rng(3)
    q = normal(rng, (batch, s_q, h_q, layout.d_qk), BF16)
    lists = {}
    for prefix, width, page_size in (("", topk, 64), ("extra_", extra, 48)):
        if width:
            # bf16 values: their product with a power-of-two scale is exact, so lse has only the kernel's own error
            values = normal(rng, (4, page_size, 1, layout.d_qk), BF16)
            cache = kv_quant.quantize(values, layout, power_of_two_scales=True)
            indices = rng.integers(-3, 4 * page_size + 3, (batch, s_q, width)).astype(np.int32)
            indices.reshape(-1)[::9] = 2**31 - 1
            lists |= {f"{prefix}k_cache": cache, f"{prefix}indices": indices,
                      f"{prefix}topk_length": np.resize(np.array([width, -1, width // 2], np.int32), batch)}
    attn_sink = np.linspace(-5, 5, h_q, dtype=np.float32) if sink else None
    arguments = {name: _device_cache(gpu, x) if name.endswith("k_cache") else gpu.put(x) for name, x in lists.items()}
    out, lse = flash_mla_with_kvcache(
        gpu.put(q), arguments.pop("k_cache"), None, None, 512, is_fp8_kvcache=True,
        attn_sink=None if attn_sink is None else gpu.put(attn_sink), **arguments)
    references = [sparse_decode.attend(q, attn_sink=attn_sink, mode=mode, **lists) for mode in ("exact", "rounded")]
    errors = compare(simulator.host(out), simulator.host(lse), *references)
    assert errors.message is None, errors.message


PAGED = {  # layout, lengths, s_q, h_q, page size (0: contiguous), causal
    "split, tails": (V32, (130, 1, 300), 1, 64, 64, False),
    "causal, empty rows, two row blocks": (V32, (0, 65, 2), 3, 40, 16, True),
    "odd pages": (D512, (200, 70), 2, 9, 48, True),
    "contiguous": (D512, (90, 31), 2, 8, 0, True),
    "crossover, causal over a block's end": (V32, (129, 65, 1, 300), 2, 64, 64, True),
    "crossover, contiguous": (D512, (90, 31), 1, 128, 0, False),
}


@pytest.mark.parametrize("case", PAGED.values(), ids=list(PAGED))
def test_dense_decode_over_an_fp8_cache(gpu, kernel_of, case):
    layout, lengths, s_q, h_q, page_size, causal = case
    rng = np.random.default_rng(5)
    q = normal(rng, (len(lengths), s_q, h_q, layout.d_qk), BF16)
    if page_size:
        values, table = paged_cache(rng, lengths, page_size, 1, layout.d_qk, BF16)
    else:
        values, table = normal(rng, (len(lengths), max(lengths), 1, layout.d_qk), BF16), None
    cache = kv_quant.quantize(values, layout, power_of_two_scales=True)
    lengths = np.array(lengths, np.int32)
    out, lse = flash_mla_with_kvcache(
        gpu.put(q), _device_cache(gpu, cache), None if table is None else gpu.put(table), gpu.put(lengths), 512,
        causal=causal, is_fp8_kvcache=True)
    references = [sparse_decode.attend_paged(q, cache, table, lengths, 512, causal=causal, mode=mode)
                  for mode in ("exact", "rounded")]
    errors = compare(simulator.host(out), simulator.host(lse), *references)
    assert errors.message is None, errors.message


FEW_PAGED = {  # lengths, s_q, h_q, page size (0: contiguous), causal
    "0, 1": ((0, 1), 1, 16, 64, False),
    "around a block": ((63, 64, 65), 1, 16, 64, False),
    "split over parts": ((700,), 1, 5, 64, False),
    "causal, over a unit's end": ((33, 2, 96, 129), 4, 4, 16, True),
    "causal, one row of queries empty": ((1, 70), 2, 8, 48, True),
    "contiguous": ((90, 31), 2, 8, 0, False),
    "rows of three tokens, causal": ((33, 130), 3, 5, 64, True),
    "many laps": ((9000,), 1, 16, 64, False),
}


@pytest.mark.parametrize("case", FEW_PAGED.values(), ids=list(FEW_PAGED))
def test_few_rows_over_pages(gpu, few_rows_alone, case):
    lengths, s_q, h_q, page_size, causal = case
    rng = np.random.default_rng(6)
    q = normal(rng, (len(lengths), s_q, h_q, V32.d_qk), BF16)
    if page_size:
        values, table = paged_cache(rng, lengths, page_size, 1, V32.d_qk, BF16)
    else:
        values, table = normal(rng, (len(lengths), max(lengths), 1, V32.d_qk), BF16), None
    cache = kv_quant.quantize(values, V32)
    lengths = np.array(lengths, np.int32)
    out, lse = flash_mla_with_kvcache(
        gpu.put(q), _device_cache(gpu, cache), None if table is None else gpu.put(table), gpu.put(lengths), 512,
        causal=causal, is_fp8_kvcache=True)
    references = [sparse_decode.attend_paged(q, cache, table, lengths, 512, causal=causal, mode=mode)
                  for mode in ("exact", "rounded")]
    errors = compare(simulator.host(out), simulator.host(lse), *references)
    assert errors.message is None, errors.message


FEW_INDICES = {  # batch, s_q, h_q, topk, extra topk, whether indices are a run
    "one token": (1, 1, 16, 1, 0, False),
    "63, 65": (1, 2, 3, 63, 65, False),
    "split, runs": (2, 1, 16, 500, 0, True),
    "nothing valid in a unit": (2, 2, 16, 128, 0, False),
}


@pytest.mark.parametrize("case", FEW_INDICES.values(), ids=list(FEW_INDICES))
def test_few_rows_by_indices(gpu, few_rows_alone, case, request):
    batch, s_q, h_q, topk, extra, runs = case
    rng = np.random.default_rng(7)
    q = normal(rng, (batch, s_q, h_q, V32.d_qk), BF16)
    lists = {"attn_sink": np.resize(np.array([-np.inf, 3, np.inf, -5], np.float32), h_q)}
    for prefix, width in (("", topk), ("extra_", extra)):
        if width:
            indices = rng.integers(-40, 4 * 64 + 40, (batch, s_q, width)).astype(np.int32)
            if runs:
                indices[...] = np.arange(width) % 300 - 20
            if "nothing" in request.node.name:
                indices[..., 32:64] = -1
                indices[0] = 256  # nor anywhere in the request
            cache = kv_quant.quantize(normal(rng, (4, 64, 1, V32.d_qk), BF16), V32)
            lists |= {f"{prefix}k_cache": cache, f"{prefix}indices": indices}
    arguments = {name: _device_cache(gpu, x) if name.endswith("k_cache") else gpu.put(x) for name, x in lists.items()}
    out, lse = flash_mla_with_kvcache(gpu.put(q), arguments.pop("k_cache"), None, None, 512, is_fp8_kvcache=True,
                                      **arguments)
    references = [sparse_decode.attend(q, mode=mode, **lists) for mode in ("exact", "rounded")]
    errors = compare(simulator.host(out), simulator.host(lse), *references)
    assert errors.message is None, errors.message


SCALES = {  # of the tile that no score depends on
    "far apart": lambda rng, shape: np.exp2(rng.uniform(-60, 60, shape)),
    "growing": lambda rng, shape: np.exp2(np.linspace(-100, 100, np.prod(shape)).reshape(shape)),
    "tiny": lambda rng, shape: np.full(shape, 2.0**-120),
    "huge": lambda rng, shape: np.full(shape, 2.0**110),
    "negative, zero": lambda rng, shape: rng.choice([-3.0, 0.0, 2.0], shape),
    "zero": lambda rng, shape: np.zeros(shape),
}


@pytest.mark.parametrize("q_gain", [1.0, 2.0**-70, 2.0**60], ids=["", "small q", "large q"])
@pytest.mark.parametrize("scales", SCALES.values(), ids=list(SCALES))
def test_few_rows_with_any_scale(gpu, few_rows_alone, scales, q_gain):
    rng = np.random.default_rng(8)
    length = 200
    q = normal(rng, (1, 1, 16, V32.d_qk), BF16) * BF16.type(q_gain)
    q[..., 256:384] = 0
    cache = kv_quant.quantize(normal(rng, (1, length, 1, V32.d_qk), BF16), V32)
    scale = kv_quant.parts_of(cache, V32).scales
    scale[..., 2] = scales(rng, scale[..., 2].shape)
    lengths = np.array([length], np.int32)
    keywords = dict(softmax_scale=V32.d_qk**-0.5 / q_gain)
    out, lse = flash_mla_with_kvcache(gpu.put(q), _device_cache(gpu, cache), None, gpu.put(lengths), 512,
                                      is_fp8_kvcache=True, **keywords)
    exact, rounded = (sparse_decode.attend_paged(q, cache, None, lengths, 512, mode=mode, **keywords)
                      for mode in ("exact", "rounded"))
    for tile in range(4):  # by itself: none hides behind the large values of another
        dims = slice(128 * tile, 128 * tile + 128)
        errors = compare(simulator.host(out)[..., dims], simulator.host(lse), (exact[0][..., dims], exact[1]),
                         (rounded[0][..., dims], rounded[1]))
        assert errors.message is None, (tile, errors.message)


CODES_SCALES = SCALES | {
    "far apart": lambda rng, shape: np.exp2(rng.uniform(-30, 50, shape)),
    "growing": lambda rng, shape: np.exp2(np.linspace(-60, 60, np.prod(shape)).reshape(shape)),
    "huge": lambda rng, shape: np.full(shape, 2.0**60),
}


@pytest.mark.parametrize("q_gain", [1.0, 2.0**-70, 2.0**60], ids=["", "small q", "large q"])
@pytest.mark.parametrize("scales", CODES_SCALES.values(), ids=list(CODES_SCALES))
def test_codes_with_any_scale(gpu, scales, q_gain):
    rng = np.random.default_rng(9)
    length = 130
    q = normal(rng, (1, 1, 33, V32.d_qk), BF16) * BF16.type(q_gain)
    q[..., 256:384] = 0
    cache = kv_quant.quantize(normal(rng, (1, length, 1, V32.d_qk), BF16), V32)
    scale = kv_quant.parts_of(cache, V32).scales
    scale[..., 2] = scales(rng, scale[..., 2].shape)
    lengths = np.array([length], np.int32)
    keywords = dict(softmax_scale=V32.d_qk**-0.5 / q_gain)
    with sparse_decode_op.with_codes(True):
        out, lse = flash_mla_with_kvcache(gpu.put(q), _device_cache(gpu, cache), None, gpu.put(lengths), 512,
                                          is_fp8_kvcache=True, **keywords)
    exact, rounded = (sparse_decode.attend_paged(q, cache, None, lengths, 512, mode=mode, **keywords)
                      for mode in ("exact", "rounded"))
    errors = compare(simulator.host(out), simulator.host(lse), exact, rounded)
    assert errors.message is None, errors.message


@pytest.mark.parametrize("gains", [(2, 30, 1, 30), (30, 1, 1), (1, 1, 30), (30,), (-30, -40)],
                         ids=["from the second block", "from the first", "from the last", "one block", "far below 0"])
def test_codes_with_large_scores(gpu, gains):
    """A warp multiplies exactly, as fp16, once a row's log-sum-exp is beyond 2^40 or below 2^-40; others do not."""
    rng = np.random.default_rng(11)
    length = 64 * len(gains) - 3
    q = normal(rng, (2, 1, 48, V32.d_qk), BF16)
    q[..., :64] = 1
    kv = normal(rng, (2, length, 1, V32.d_qk), np.float32)
    kv[..., :64] = np.repeat(gains, 64)[:length, None, None]  # adds 64 gain to what is multiplied
    cache = kv_quant.quantize(kv.astype(BF16), V32, power_of_two_scales=True)
    lengths = np.array([length, 70 % length + 1], np.int32)
    q[1] *= BF16.type(0.01)
    with sparse_decode_op.with_codes(True):
        out, lse = flash_mla_with_kvcache(gpu.put(q), _device_cache(gpu, cache), None, gpu.put(lengths), 512,
                                          is_fp8_kvcache=True)
    exact, rounded = (sparse_decode.attend_paged(q, cache, None, lengths, 512, mode=mode)
                      for mode in ("exact", "rounded"))
    assert (np.abs(exact[1][0]) > 40 * np.log(2)).all() and (np.abs(exact[1][1]) < 40 * np.log(2)).all()
    errors = compare(simulator.host(out), simulator.host(lse), exact, rounded)
    assert errors.message is None, errors.message


def _device_cache(gpu, cache):
    """The same pages, each at the distance that the layout keeps."""
    pages, page_size, _, width = cache.shape
    memory = gpu.alloc(pages * cache.strides[0])
    array = cupy.ndarray(cache.shape, np.uint8, memory, cache.strides)
    simulator.host(array)[...] = cache
    return array


PREFILL = {  # s_q, h_q, s_kv, topk, d_qk, topk_length, lengths of queries and keys of the requests
    "one block": (1, 64, 300, 64, 576, None, None),
    "tails, more tokens than CTAs": (9, 16, 70, 130, 576, None, None),
    "two head blocks, sink": (5, 100, 200, 200, 576, None, None),
    "d_qk 512, three head blocks, sink": (4, 129, 90, 65, 512, None, None),
    "lengths, empty tokens, sink": (11, 3, 300, 200, 576, (200, 0, -5, 1, 64, 65, 129, 0, 0, 1 << 20, 63), None),
    "d_qk 512, lengths": (7, 70, 40, 70, 512, (0, 0, 70, 3, 0, 64, 0), None),
    "fewer keys than indices": (3, 8, 5, 100, 576, None, None),
    "one index": (2, 1, 9, 1, 512, None, None),
    "requests": (10, 12, 150, 90, 576, None, ((3, 0, 5, 1), (60, 10, 0, 70))),
    "requests, lengths, tokens of none, sink": (
        9, 66, 120, 70, 512, (70, 5, 64, 65, 0, 70, 70, 66, 1), ((4, 2), (50, 65))),
}


@pytest.mark.parametrize("name", PREFILL)
def test_sparse_prefill(gpu, name):
    """With an attention sink if the name says so."""
    s_q, h_q, s_kv, topk, d_qk, lengths, requests = PREFILL[name]
    rng = np.random.default_rng(6)
    q, kv = normal(rng, (s_q, h_q, d_qk), BF16), normal(rng, (s_kv, 1, d_qk), BF16)
    indices = rng.integers(-3, s_kv + 3, (s_q, 1, topk)).astype(np.int32)
    indices.reshape(-1)[::9] = 2**31 - 1
    keywords = {"attn_sink": np.linspace(-5, 5, h_q, dtype=np.float32) if "sink" in name else None,
                "topk_length": None if lengths is None else np.array(lengths, np.int32)}
    if requests is not None:
        for name, counts in zip(("cu_seqlens_q", "cu_seqlens_kv"), requests, strict=True):
            keywords[name] = np.cumsum((0, *counts), dtype=np.int32)
    scale = d_qk**-0.5
    results = flash_mla_sparse_fwd(gpu.put(q), gpu.put(kv), gpu.put(indices), scale,
                                   **{name: None if x is None else gpu.put(x) for name, x in keywords.items()})
    out, max_logits, lse = (simulator.host(x) for x in results)
    exact, rounded = (sparse_prefill.attend(q, kv, indices, scale, mode=mode, **keywords)
                      for mode in ("exact", "rounded"))
    for got, which in ((lse, 2), (max_logits, 1)):
        references = ((x[0][:, None], x[which][..., None]) for x in (exact, rounded))
        errors = compare(out[:, None], got[..., None], *references)
        assert errors.message is None, errors.message


HOSTILE = (
    PrefillCase(3, 130, h_q=16, invalid="random", kv_layout="interleaved", q_layout="head_view", out_layout="swapped",
                sink="mixed"),
    PrefillCase(8, 70, h_q=70, d_qk=512, requests="empty", length="negative", kv_layout="reversed",
                out_layout="padded", q_layout="padded", poison="inf"),
    PrefillCase(5, 65, h_q=3, invalid="runs", kv_layout="unaligned", q_layout="swapped", out_layout="head_view",
                requests="gaps", sink="+inf"),
)


@pytest.mark.parametrize("case", HOSTILE, ids=lambda case: case.name)
def test_sparse_prefill_of_hostile_arrays(gpu, case):
    """Unused rows NaN or Inf, views of larger buffers, guard bands around the results; one plan for two calls."""
    given, machine = prefill_inputs.build(case), Machine(np, False, "simulated")
    arrays = {name: getattr(given, name) for name in ("q", "kv", "indices")} | given.keywords()
    arrays |= {name: guarded.array for name, guarded in given.outputs.items()}
    on_device = {name: None if x is None else _over_host_memory(x) for name, x in arrays.items()}
    for _ in range(2):
        bits = prefill_checks.run_guarded(lambda: prefill_checks.call(case, given, **on_device), given, machine)
        assert not isinstance(bits, Errors), bits.message
        errors = prefill_checks.check(case, given, machine)
        assert errors.message is None, errors.message
    assert len(_plans.PLANS) == (case.kv_layout != "unaligned")


def _over_host_memory(x):
    """A device array that is the memory of a host array, which the simulated kernels read like any other."""
    memory = cupy.cuda.UnownedMemory(x.ctypes.data, max(x.nbytes, 1), x, 0)
    return cupy.ndarray(x.shape, x.dtype, cupy.cuda.MemoryPointer(memory, 0), x.strides)


@pytest.mark.parametrize("count", [1, 5, 33])
def test_merge_states(gpu, count):
    rng = np.random.default_rng(4)
    outs, lses = normal(rng, (count, 3, 2, 5, 64), np.float32), normal(rng, (count, 3, 5, 2), np.float32)
    lses[0, 0] = -np.inf
    out, lse = (simulator.host(x) for x in merge_states(gpu.put(outs), gpu.put(lses)))
    by_row = lses.astype(np.float64).swapaxes(2, 3)
    exact_out, exact_lse = reference_combine.merge(outs.astype(np.float64), by_row, xp=np)
    assert np.allclose(out, exact_out, atol=1e-5) and np.allclose(lse, exact_lse.swapaxes(1, 2), atol=1e-5)


@pytest.mark.parametrize("count", [1, 2, 5, 40])
def test_merging_the_largest_numbers_does_not_overflow(gpu, count):
    outs = np.full((count, 3, 8), 3e38, np.float32)
    out, _ = merge_states(gpu.put(outs), gpu.put(np.zeros((count, 3), np.float32)))
    assert np.allclose(simulator.host(out), 3e38)


@pytest.mark.parametrize("stacked", [False, True])
def test_merge_states_of_one_axis(gpu, stacked):
    outs, lses = np.arange(8, dtype=np.float32).reshape(2, 4), np.zeros(2, np.float32)
    if stacked:
        out, lse = merge_states(gpu.put(outs), gpu.put(lses))
    else:
        out, lse = merge_states([gpu.put(x) for x in outs], [gpu.put(np.array(x)) for x in lses])
    assert simulator.host(out).tolist() == [2, 3, 4, 5]
    assert lse.shape == () and abs(simulator.host(lse) - np.log(2)) < 1e-6


@pytest.mark.parametrize("lengths", [[0], [1, 0, 4096, 63], [500] * 40, list(range(0, 3000, 37))], ids=len)
def test_scheduler_is_its_twin(gpu, lengths):
    lengths = np.array(lengths, np.int32)
    got = get_mla_metadata(gpu.put(lengths), 128, 1, 128)
    for kernel, twin in zip(got, reference_plan.plan(lengths, SMS // 2), strict=True):
        assert np.array_equal(simulator.host(kernel), twin)
