"""quantize_kv_cache, dequantize_kv_cache and token_indices: NumPy results, errors, and what would be launched."""

from __future__ import annotations

import re
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from fake_gpu import BF16, H200, STREAM, gpu  # noqa: F401

import flashmla_cupy
from flashmla_cupy.errors import UnsupportedError
from flashmla_cupy.kv_format import FORMATS, V32
from flashmla_cupy.ops import _select
from flashmla_cupy.reference import kv_quant as reference
from flashmla_cupy.runtime import compile as runtime_compile
from flashmla_cupy.runtime import params
from tests.common import REPO

LAYOUTS = pytest.mark.parametrize("layout", FORMATS.values(), ids=FORMATS)
SPECS = [spec for spec in _select.all_specs() if spec.op == "kv_quant"]


def random_kv(shape, dtype=BF16):
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32).astype(dtype)


# ---- NumPy
@LAYOUTS
@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=str)
def test_pages_there_and_back(layout, dtype):
    kv = random_kv((3, 16, 1, layout.d_qk), dtype)
    cache = flashmla_cupy.quantize_kv_cache(kv, layout=layout.name)
    np.testing.assert_array_equal(cache, reference.quantize(kv, layout))
    back = flashmla_cupy.dequantize_kv_cache(cache, layout=layout.name, dtype="float32")
    assert back.dtype == np.float32 and np.abs(back - kv.astype(np.float32)).max() < 0.3
    out = np.full((3, 16, 1, layout.d_qk + 3), np.nan, BF16)[..., 1:-2]
    assert flashmla_cupy.dequantize_kv_cache(cache.view(np.int8), layout=layout.name, out=out) is out
    np.testing.assert_array_equal(out, reference.dequantize(cache, layout, dtype=BF16))
    fp8 = flashmla_cupy.dequantize_kv_cache(cache.view(ml_dtypes.float8_e4m3fn), layout=layout.name)
    np.testing.assert_array_equal(fp8, out)


@LAYOUTS
@pytest.mark.parametrize("tokens", [0, 1, 15, 16, 17, 40, 48])
@pytest.mark.parametrize("heads", [(), (1,)])
def test_tokens_fill_one_page_after_the_other(layout, tokens, heads):
    kv = random_kv((tokens, *heads, layout.d_qk))
    pages = -(-tokens // 16)
    padded = np.zeros((pages * 16, layout.d_qk), BF16)
    padded[:tokens] = kv.reshape(tokens, layout.d_qk)
    expected = reference.quantize(padded.reshape(pages, 16, 1, layout.d_qk), layout)
    cache = flashmla_cupy.quantize_kv_cache(kv, layout=layout.name, page_size=16)
    out = np.full((pages, 16 * layout.bytes_per_token + 32), 0xA5, np.uint8)
    view = np.lib.stride_tricks.as_strided(out, expected.shape, (out.strides[0], *[layout.bytes_per_token] * 2, 1))
    assert flashmla_cupy.quantize_kv_cache(kv, layout=layout.name, page_size=16, out=view) is view
    for got, rest in ((cache, 0), (view, 0xA5)):
        for part, want in zip(reference.parts_of(got, layout), reference.parts_of(expected, layout), strict=True):
            part, want = (x.copy().view(np.uint8).reshape(pages * 16, part[0, 0].nbytes if pages else 0)
                          for x in (part, want))
            np.testing.assert_array_equal(part[:tokens], want[:tokens])
            assert (part[tokens:] == rest).all()
    assert (out[:, 16 * layout.bytes_per_token:] == 0xA5).all()


def test_power_of_two_scales_on_request():
    kv = random_kv((2, 4, 1, 576))
    scales = reference.parts_of(flashmla_cupy.quantize_kv_cache(kv, power_of_two_scales=True), V32).scales
    assert (np.frexp(scales)[0] == 0.5).all()
    assert not (np.frexp(reference.parts_of(flashmla_cupy.quantize_kv_cache(kv), V32).scales)[0] == 0.5).all()
    plain, asked = (flashmla_cupy.quantize_kv_cache(random_kv((2, 4, 1, 512)), layout="d512", power_of_two_scales=flag)
                    for flag in (False, True))
    np.testing.assert_array_equal(plain, asked)


def test_token_indices_of_lists_and_int64():
    got = flashmla_cupy.token_indices([[3, 1]], np.array([[0, 63, 64, 127, 128, -1]], np.int64), 64)
    assert got.dtype == np.int32 and got.tolist() == [[192, 255, 64, 127, -1, -1]]
    zeros = np.zeros((2, 3), np.int32)
    assert (flashmla_cupy.token_indices(zeros[:, :0], zeros, 64) == np.full((2, 3), -1)).all()
    assert flashmla_cupy.token_indices(zeros, np.zeros((2, 0, 5), np.int32), 64).shape == (2, 0, 5)


# ---- errors
KV, CACHE = random_kv((2, 4, 1, 576)), reference.quantize(random_kv((2, 4, 1, 576)), V32)
BAD_QUANTIZE = [
    (dict(kv=KV.astype(np.float16)), TypeError, "kv: got dtype float16, expected bfloat16 or float32"),
    (dict(kv=KV[0, 0, 0]), ValueError, r"kv: got shape \(576,\)"),
    (dict(kv=np.repeat(KV, 2, axis=2)), ValueError, "kv: got 2 heads, expected 1"),
    (dict(kv=KV[..., :512]), ValueError, "kv: got head dimension 512, expected 576 for layout v32"),
    (dict(kv=KV[0, :, 0]), TypeError, "page_size: got None"),
    (dict(kv=KV, page_size=8), ValueError, "page_size: got 8, expected 4"),
    (dict(kv=KV, page_size=0), ValueError, "page_size: got 0"),
    (dict(kv=KV, layout="v33"), ValueError, "layout: got 'v33', expected 'v32' or 'd512'"),
    (dict(kv=KV, layout=32), TypeError, "layout: got 32"),
    (dict(kv=KV, power_of_two_scales=1), TypeError, "power_of_two_scales: got 1, expected a bool"),
    (dict(kv=[1.0]), TypeError, "kv: got an object of type list"),
    (dict(kv=KV, out=CACHE[:1].copy()), ValueError, r"out: got shape \(1, 4, 1, 656\), expected \(2, 4, 1, 656\)"),
    (dict(kv=KV, out=CACHE.astype(np.uint16)), TypeError, "out: got dtype uint16, expected uint8"),
    (dict(kv=KV, out=np.broadcast_to(CACHE[:1], CACHE.shape)), ValueError, "out: got a page stride of 0 bytes"),
    (dict(kv=KV, out=np.zeros((2, 8, 1, 656), np.uint8)[:, ::2]), ValueError, "out: got strides .* 656 bytes apart"),
]


@pytest.mark.parametrize("arguments, error, message", BAD_QUANTIZE)
def test_quantize_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        flashmla_cupy.quantize_kv_cache(**arguments)


def test_out_that_cannot_be_written():
    frozen = CACHE.copy()
    frozen.flags.writeable = False
    with pytest.raises(ValueError, match="out: got a read-only array"):
        flashmla_cupy.quantize_kv_cache(KV, out=frozen)


@pytest.mark.parametrize("arguments, error, message", [
    (dict(cache=CACHE[..., :640]), ValueError, "cache: got 640 bytes per token, expected 656 for layout v32 "
     r"\(512 e4m3, 4 float32 scales in 16 bytes, 64 bfloat16\)"),
    (dict(cache=CACHE, layout="d512"), ValueError, "cache: got 656 bytes per token, expected 584 for layout d512"),
    (dict(cache=CACHE[:, :, 0]), ValueError, "cache: got shape .* expected 4 axes"),
    (dict(cache=np.repeat(CACHE, 2, axis=2)), ValueError, "cache: got 2 heads, expected 1"),
    (dict(cache=CACHE[::-1]), ValueError, "cache: got a page stride of -2624 bytes"),
    (dict(cache=KV), TypeError, "cache: got dtype bfloat16, expected uint8"),
    (dict(cache=CACHE, dtype="float16"), TypeError, "dtype: got 'float16', expected 'bfloat16' or 'float32'"),
    (dict(cache=CACHE, dtype="nothing"), TypeError, "dtype: got 'nothing'"),
    (dict(cache=CACHE, out=np.empty((2, 4, 1, 576), np.float32)), TypeError, "out: got dtype float32, expected bf"),
    (dict(cache=CACHE, out=np.empty((2, 4, 576), BF16)), ValueError, r"out: got shape \(2, 4, 576\)"),
])
def test_dequantize_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        flashmla_cupy.dequantize_kv_cache(**arguments)


@pytest.mark.parametrize("arguments, error, message", [
    ((np.zeros(3, np.int32), np.zeros((3, 1), np.int32), 64), ValueError, "block_table: got shape"),
    ((np.zeros((3, 2), np.int32), np.zeros((2, 1), np.int32), 64), ValueError, "positions: got .*expected .3"),
    ((np.zeros((3, 2), np.int32), np.int32(1), 64), (ValueError, TypeError), "positions"),
    ((np.zeros((3, 2)), np.zeros((3, 1), np.int32), 64), TypeError, "block_table: got dtype float64"),
    ((np.zeros((3, 2), np.int32), np.zeros((3, 1), np.int32), 0), ValueError, "page_size: got 0"),
])
def test_token_indices_refuses(arguments, error, message):
    with pytest.raises(error, match=message):
        flashmla_cupy.token_indices(*arguments)


# ---- on a GPU that is not there
def test_experimental_kernels_are_refused_with_a_reason(gpu, monkeypatch):  # noqa: F811
    with monkeypatch.context() as patch:  # undone before the fixture's own context
        patch.setattr(_select, "_experimental_allowed", False)
        for table in (_select._QUANTIZE, _select._DEQUANTIZE, _select._TOKEN_INDICES):
            for key, spec in table.items():
                patch.setitem(table, key, replace(spec, experimental=True))
        for call in (lambda: flashmla_cupy.quantize_kv_cache(gpu.array((2, 4, 1, 576))),
                     lambda: flashmla_cupy.dequantize_kv_cache(gpu.array((2, 4, 1, 656), np.uint8)),
                     lambda: flashmla_cupy.token_indices(gpu.array((2, 4), np.int32), gpu.array((2, 4), np.int32), 64)):
            with pytest.raises(UnsupportedError, match="kv_quant.*experimental.*NumPy"):
                call()
    assert gpu.events == []


@LAYOUTS
def test_selection(layout):
    def reasons(device):
        with pytest.raises(UnsupportedError) as error:
            _select.select(_select.Problem("kv_quant.quantize", "float16", layout.d_qk), device)
        return error.value.reasons

    a100 = replace(H200, name="NVIDIA A100", compute_capability=(8, 0), arch="sm_80")
    assert len(reasons(a100)) == 2 and "expected 8.9 or higher" in reasons(a100)[0]
    assert "got float16 with" in reasons(H200)[0]
    with _select.experimental_kernels():
        spec = _select.select(_select.Problem("kv_quant.dequantize", "float32", layout.d_qk), H200)
    assert spec.name == f"kv_quant.dequantize_sm89.{layout.name}.fp32" and spec in SPECS


@LAYOUTS
@pytest.mark.parametrize("dtype, tag", [(BF16, "bf16"), (np.float32, "fp32")])
def test_quantize_pages(layout, dtype, tag, gpu):  # noqa: F811
    kv = gpu.array((5, 24, 1, layout.d_qk), dtype)
    cache = flashmla_cupy.quantize_kv_cache(kv, layout=layout.name, power_of_two_scales=True)
    assert cache.shape == (5, 24, 1, layout.bytes_per_token) and cache.strides[0] == layout.page_bytes(24)
    (launch,) = gpu.events
    record = launch.params
    assert launch.name == f"kv_quant.quantize_sm89.{layout.name}.{tag}" and launch.grid == (15, 1, 1)
    assert launch.pdl and launch.stream == STREAM
    assert (record["kv"], record["cache"]) == (kv.data.ptr, cache.data.ptr)
    assert (record["kv_stride_page"], record["kv_stride_token"]) == (24 * layout.d_qk, layout.d_qk)
    assert record["cache_stride_page"] == layout.page_bytes(24) and record["tokens"] == 120
    assert (record["page_size_magic"], record["page_size_shift"]) == params.divisor(24)
    assert record["power_of_two_scales"] == 1 and record["page_size"] == 24


def test_quantize_tokens_into_a_strided_cache(gpu):  # noqa: F811
    kv = gpu.array((70, 1, 576), strides=(2 * 2 * 576, 2 * 576, 2))
    out = gpu.array((2, 64, 1, 656), np.uint8, strides=(4 * 64 * 656, 656, 656, 1))
    assert flashmla_cupy.quantize_kv_cache(kv, page_size=64, out=out) is out
    (launch,) = gpu.events
    assert launch.grid == (9, 1, 1) and launch.params["tokens"] == 70
    assert (launch.params["kv_stride_page"], launch.params["kv_stride_token"]) == (64 * 1152, 1152)
    assert launch.params["cache_stride_page"] == 4 * 64 * 656 and launch.params["power_of_two_scales"] == 0


def test_new_cache_with_a_tail_is_cleared_first(gpu):  # noqa: F811
    cache = flashmla_cupy.quantize_kv_cache(gpu.array((70, 576)), page_size=64)
    (kind, target, value), launch = gpu.events
    assert kind == "assign" and value == 0 and target.data.ptr == cache.data.ptr and target.size == 2 * 64 * 656


def test_rows_off_16_bytes_are_copied(gpu):  # noqa: F811
    kv = gpu.array((2, 4, 1, 576), offset_bytes=2)
    flashmla_cupy.quantize_kv_cache(kv)
    (kind, source, copy), launch = gpu.events
    assert kind == "copy" and launch.params["kv"] == copy.data.ptr != kv.data.ptr
    gpu.events.clear()
    out = gpu.array((2, 4, 1, 576), offset_bytes=2)
    assert flashmla_cupy.dequantize_kv_cache(gpu.array((2, 4, 1, 656), np.uint8), out=out) is out
    launch, (kind, target, source) = gpu.events
    assert kind == "assign" and target is out and launch.params["kv"] == source.data.ptr


@LAYOUTS
def test_dequantize(layout, gpu):  # noqa: F811
    cache = gpu.array((5, 64, 1, layout.bytes_per_token), np.uint8,
                          strides=(layout.page_bytes(64) * 3, *[layout.bytes_per_token] * 2, 1))
    out = flashmla_cupy.dequantize_kv_cache(cache, layout=layout.name, dtype=np.float32)
    (launch,) = gpu.events
    assert out.shape == (5, 64, 1, layout.d_qk) and out.dtype == np.float32
    assert launch.name == f"kv_quant.dequantize_sm89.{layout.name}.fp32" and launch.grid == (40, 1, 1)
    assert launch.params["cache_stride_page"] == 3 * layout.page_bytes(64)


def test_nothing_to_do_launches_nothing(gpu):  # noqa: F811
    flashmla_cupy.quantize_kv_cache(gpu.array((0, 64, 1, 576)))
    flashmla_cupy.dequantize_kv_cache(gpu.array((3, 0, 1, 656), np.uint8))
    flashmla_cupy.token_indices(gpu.array((0, 4), np.int32), gpu.array((0, 7), np.int32), 64)
    assert gpu.launches == []


def test_token_indices_launch(gpu):  # noqa: F811
    table = gpu.array((3, 5), np.int32, strides=(4 * 9, 4))
    positions = gpu.array((3, 2, 50), np.int32)
    indices = flashmla_cupy.token_indices(table, positions, 64)
    (launch,) = gpu.events
    record = launch.params
    assert indices.shape == (3, 2, 50) and indices.dtype == np.int32 and launch.grid == (2, 1, 1)
    assert (record["block_table"], record["positions"]) == (table.data.ptr, positions.data.ptr)
    assert (record["block_table_stride"], record["positions_stride"], record["table_width"]) == (9, 100, 5)
    assert (record["count"], record["per_request"]) == (300, 100)
    assert (record["per_request_magic"], record["per_request_shift"]) == params.divisor(100)


def test_token_indices_converts_and_uploads(gpu):  # noqa: F811
    flashmla_cupy.token_indices(np.zeros((3, 5), np.int32), gpu.array((3, 8), np.int64), 64)
    assert [event[0] for event in gpu.events[:2]] == ["upload", "copy"] and len(gpu.launches) == 1


@pytest.mark.parametrize("call, message", [
    (lambda g: flashmla_cupy.quantize_kv_cache(g.array((2, 4, 1, 576)), out=g.array((2, 4, 1, 656), np.uint8, 8)),
     "out: got address .* expected multiples of 16"),
    (lambda g: flashmla_cupy.dequantize_kv_cache(
        g.array((2, 4, 1, 656), np.uint8, strides=(2632, 656, 656, 1))), "page stride of 2632 bytes"),
    (lambda g: flashmla_cupy.quantize_kv_cache(g.array((2, 4, 1, 576), offset_bytes=1)), "kv: got address"),
    (lambda g: flashmla_cupy.quantize_kv_cache(g.array((2, 4, 1, 576)),
                                               out=g.array((2, 4, 1, 656), np.uint8, device=1)), "out: .* device 1"),
    (lambda g: flashmla_cupy.token_indices(g.array((2, 4), np.int32), g.array((2, 4), np.int32, device=1), 64),
     "device"),
])
def test_device_arrays_that_a_kernel_cannot_take(call, message, gpu):  # noqa: F811
    with pytest.raises(ValueError, match=message):
        call(gpu)
    assert gpu.events == []


def test_host_out_beside_device_arrays(gpu):  # noqa: F811
    with pytest.raises(TypeError, match="^out: got NumPy uint8 array"):
        flashmla_cupy.quantize_kv_cache(gpu.array((2, 4, 1, 576)), out=CACHE.copy())


# ---- sources
@LAYOUTS
def test_both_sides_describe_the_same_bytes(layout):
    text = (REPO / "cuda_src/common/kv_format.cuh").read_text()
    (arguments,) = re.findall(rf"using {layout.name.upper()} = Format<([^>]*)>;", text)
    d_nope, d_rope, tile, scale_bytes, in_row, ue8m0 = arguments.split(", ")
    assert [int(x) for x in (d_nope, d_rope, tile, scale_bytes)] == [
        layout.d_nope, layout.d_rope, layout.tile, layout.scale_bytes]
    assert (in_row == "true", ue8m0 == "true") == (layout.scales_in_row, layout.scale == "ue8m0")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.name)
def test_kernels_compile_without_spills(spec):
    compiled = runtime_compile.compile_cubin(spec)
    assert compiled.spill_bytes == 0 and compiled.local_bytes == 0 and compiled.registers <= 48
    assert compiled.record.threads == 256 and compiled.record.smem_bytes == 0
    assert runtime_compile.compile_cubin(spec, "sm_89").spill_bytes == 0
