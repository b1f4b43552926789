# ruff: noqa: F811 (the gpu fixture)
"""Sparse and FP8 decode through the public API: results on NumPy arrays, and errors before anything is launched."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from fake_gpu import BF16, gpu  # noqa: F401
from test_api_errors import META, Host, fails

from flashmla_cupy import UnsupportedError, flash_mla_with_kvcache, get_mla_metadata, merge_states
from flashmla_cupy.kv_format import D512, V32
from flashmla_cupy.ops import _plans, _select
from flashmla_cupy.ops import sparse_decode as sparse_decode_op
from flashmla_cupy.ops.dense_decode import mla_workspace_bytes
from flashmla_cupy.reference import kv_quant, sched_meta, sparse_decode
from flashmla_cupy.reference._numerics import cast

FP8 = np.dtype(ml_dtypes.float8_e4m3fn)
BYTES_PER_TOKEN = {576: 656, 512: 584}


def sparse(place, batch=2, s_q=1, h_q=16, h_kv=1, d_qk=576, topk=64, fp8=True, page_size=64, pages=40, extra=False,
           **changes):
    """Keyword arguments of a call on zeros (host) or on no memory (fake GPU)."""
    width, dtype = (BYTES_PER_TOKEN[d_qk], np.uint8) if fp8 else (d_qk, BF16)
    arguments = dict(
        q=place.array((batch, s_q, h_q, d_qk)), k_cache=place.array((pages, page_size, h_kv, width), dtype),
        block_table=None, cache_seqlens=None, head_dim_v=512, is_fp8_kvcache=fp8,
        indices=place.array((batch, s_q, topk), np.int32))
    if extra:
        arguments.update(extra_k_cache=place.array((7, 48, h_kv, width), dtype),
                         extra_indices=place.array((batch, s_q, 5), np.int32))
    return {**arguments, **changes}


def dense_fp8(place, d_qk=576, **changes):
    """The same for an FP8 cache without indices."""
    width = BYTES_PER_TOKEN[d_qk]
    return {**place.decode(d_qk=d_qk), "k_cache": place.array((40, 64, 1, width), np.uint8), "is_fp8_kvcache": True,
            **changes}


def random_call(seed=0, batch=2, s_q=2, h_q=16, h_kv=1, layout=V32, topk=70, pages=5, page_size=64):
    """Random q, FP8 cache (or with layout None, 16-bit cache) and indices, some of them invalid."""
    rng = np.random.default_rng(seed)
    d_qk = 576 if layout is None else layout.d_qk
    values = rng.standard_normal((pages, page_size, h_kv, d_qk)).astype(BF16)
    return dict(q=rng.standard_normal((batch, s_q, h_q, d_qk)).astype(BF16),
                k_cache=values if layout is None else kv_quant.quantize(values, layout), block_table=None,
                cache_seqlens=None, head_dim_v=512, is_fp8_kvcache=layout is not None,
                indices=rng.integers(-9, pages * page_size + 9, (batch, s_q, topk)).astype(np.int32))


def check(arguments, **changes):
    """Runs the call and compares it with the reference."""
    arguments = {**arguments, **changes}
    out, lse = flash_mla_with_kvcache(**arguments)
    names = ("indices", "softmax_scale", "attn_sink", "topk_length", "extra_k_cache", "extra_indices",
             "extra_topk_length")
    exact = sparse_decode.attend(arguments["q"], arguments["k_cache"],
                                 **{name: arguments[name] for name in names if name in arguments})
    q = arguments["q"]
    assert out.dtype == q.dtype and lse.dtype == np.float32 and lse.shape == (q.shape[0], q.shape[2], q.shape[1])
    np.testing.assert_array_equal(out, cast(exact[0], q.dtype))
    np.testing.assert_array_equal(lse, exact[1].astype(np.float32))
    return out, lse


def same(a, b):
    return all((x == y).all() for x, y in zip(a, b, strict=True))


@pytest.fixture(params=["host", "gpu"])
def place(request, gpu):
    return Host() if request.param == "host" else gpu


# ---- wrong arguments, with indices ----
BAD = [  # argument to change, its value, error, part of the message, and the argument named where it is another one
    ("q", lambda p: p.array((2, 1, 16, 576), np.float32), TypeError, "dtype float32"),
    ("q", lambda p: p.array((2, 1, 16, 576), np.float16), TypeError, "float16, expected bfloat16 with an FP8 cache"),
    ("q", lambda p: p.array((2, 16, 576)), ValueError, "4 axes"),
    ("q", lambda p: p.array((2, 1, 16, 640)), ValueError, "head dimension 640"),
    ("q", lambda p: p.array((2, 1, 0, 576)), ValueError, "0 heads"),
    ("q", None, TypeError, "None"),
    ("k_cache", None, TypeError, "None"),
    ("k_cache", lambda p: p.array((40, 64, 1, 576), np.uint8), ValueError, "got 576 bytes per token, expected 656"),
    ("k_cache", lambda p: p.array((40, 64, 1, 584), np.uint8), ValueError, "got 584 bytes per token, expected 656"),
    ("k_cache", lambda p: p.array((40, 64, 1, 656), np.int32), TypeError, "dtype int32, expected uint8"),
    ("k_cache", lambda p: p.array((40, 64, 1, 576)), TypeError,
     "dtype bfloat16, expected uint8 (or int8, float8_e4m3fn)"),
    ("k_cache", lambda p: p.array((40, 64, 656), np.uint8), ValueError, "(40, 64, 656), expected 4 axes"),
    ("k_cache", lambda p: p.array((40, 64, 2, 656), np.uint8), ValueError, "2 heads, expected 1"),
    ("k_cache", lambda p: p.array((40, 64, 0, 656), np.uint8), ValueError, "0 heads"),
    ("k_cache", lambda p: p.array((40, 65, 1, 656), np.uint8, strides=(65 * 672, 672, 672, 1)), ValueError,
     "672 bytes from token to token"),
    ("is_fp8_kvcache", False, TypeError, "got False, expected True with k_cache of dtype uint8"),
    ("is_fp8_kvcache", 1, TypeError, "1"),
    ("is_fp8_kvcache", None, TypeError, "None"),
    ("head_dim_v", 576, ValueError, "576"),
    ("causal", True, ValueError, "got True, expected False with indices"),
    ("causal", 0.04, TypeError, "0.04"),
    ("softmax_scale", -1.0, ValueError, "-1.0"),
    ("indices", lambda p: p.array((2, 1, 0), np.int32), ValueError, "topk 0, expected at least 1"),
    ("indices", lambda p: p.array((2, 1, 1, 0), np.int32), ValueError, "topk 0, expected at least 1"),
    ("indices", lambda p: p.array((2, 64), np.int32), ValueError, "shape (2, 64), expected (2, 1) and topk"),
    ("indices", lambda p: p.array((3, 1, 64), np.int32), ValueError, "shape (3, 1, 64)"),
    ("indices", lambda p: p.array((2, 2, 64), np.int32), ValueError, "shape (2, 2, 64)"),
    ("indices", lambda p: p.array((2, 1, 2, 64), np.int32), ValueError, "or (2, 1, 1) and topk"),
    ("indices", lambda p: p.array((2, 1, 64), np.float32), TypeError, "dtype float32"),
    ("indices", "all", TypeError, "'all'"),
    ("attn_sink", lambda p: p.array((16,), np.float64), TypeError, "dtype float64, expected float32"),
    ("attn_sink", lambda p: p.array((16,), BF16), TypeError, "dtype bfloat16, expected float32"),
    ("attn_sink", lambda p: p.array((15,), np.float32), ValueError, "shape (15,), expected (16,)"),
    ("attn_sink", lambda p: p.array((2, 16), np.float32), ValueError, "shape (2, 16)"),
    ("attn_sink", 0.0, TypeError, "0.0"),
    ("topk_length", lambda p: p.array((3,), np.int32), ValueError, "shape (3,), expected (2,)"),
    ("topk_length", lambda p: p.array((2, 1), np.int32), ValueError, "shape (2, 1)"),
    ("topk_length", lambda p: p.array((2,), np.float32), TypeError, "dtype float32"),
    ("topk_length", 64, TypeError, "64"),
    ("extra_indices", None, TypeError, "got None, expected int32 indices into extra_k_cache"),
    ("extra_indices", lambda p: p.array((2, 1, 0), np.int32), ValueError, "topk 0"),
    ("extra_indices", lambda p: p.array((1, 1, 5), np.int32), ValueError, "shape (1, 1, 5)"),
    ("extra_indices", lambda p: p.array((2, 1, 5), np.float32), TypeError, "dtype float32"),
    ("extra_k_cache", None, TypeError, "expected None without extra_k_cache", "extra_indices"),
    ("extra_k_cache", lambda p: p.array((7, 48, 1, 576), np.uint8), ValueError, "576 bytes per token, expected 656"),
    ("extra_k_cache", lambda p: p.array((7, 48, 1, 576)), TypeError, "dtype bfloat16, expected uint8"),
    ("extra_k_cache", lambda p: p.array((7, 48, 656), np.uint8), ValueError, "4 axes"),
    ("extra_k_cache", lambda p: p.array((7, 48, 2, 656), np.uint8), ValueError, "2 heads"),
    ("extra_topk_length", lambda p: p.array((3,), np.int32), ValueError, "shape (3,)"),
    ("extra_topk_length", [1.5, 2], TypeError, "float64"),
    (META, lambda p: p.array((132, 8), np.int32), TypeError, "None", "num_splits"),
    ("out", lambda p: p.array((2, 1, 16, 576)), ValueError, "shape (2, 1, 16, 576)"),
    ("out", lambda p: p.array((2, 1, 16, 512), np.float32), TypeError, "dtype float32"),
    ("out", lambda p: p.array((2, 1, 16, 512), strides=(0, 0, 1024, 2)), ValueError, "overlap"),
    ("lse", lambda p: p.array((2, 1, 16), np.float32), ValueError, "shape (2, 1, 16)"),
]


@pytest.mark.parametrize("row", BAD, ids=lambda row: f"{row[0]}-{row[3]}")
def test_wrong_arguments_with_indices(place, row):
    argument, value, error, text, *named = row
    arguments = sparse(place, extra=True)
    arguments[argument] = value(place) if callable(value) else value
    fails(lambda: flash_mla_with_kvcache(**arguments), *(named or [argument]), error, text, place.launches)


@pytest.mark.parametrize("argument, value, error, text", [
    ("k_cache", lambda p: p.array((40, 64, 1, 576), np.uint8), ValueError, "got 576 bytes per token, expected 656"),
    ("k_cache", lambda p: p.array((40, 0, 1, 656), np.uint8), ValueError, "page size 0, expected at least 1"),
    ("k_cache", lambda p: p.array((40, 64, 1, 576)), TypeError, "dtype bfloat16, expected uint8"),
    ("k_cache", lambda p: p.array((40, 64, 2, 656), np.uint8), ValueError, "2 heads, expected 1"),
    ("q", lambda p: p.array((2, 1, 16, 512)), ValueError, "got 656 bytes per token, expected 584"),
    ("is_fp8_kvcache", False, TypeError, "expected True with k_cache of dtype uint8"),
    ("is_fp8_kvcache", 0, TypeError, "0"),
    ("cache_seqlens", None, TypeError, "None"),
    ("cache_seqlens", lambda p: p.array((3,), np.int32), ValueError, "shape (3,)"),
    ("block_table", None, ValueError, "batch 40 with block_table=None"),
    ("block_table", lambda p: p.array((3, 8), np.int32), ValueError, "3 rows"),
    ("attn_sink", lambda p: p.array((16,), np.float32), TypeError, "expected None without indices"),
    ("topk_length", lambda p: p.array((2,), np.int32), TypeError, "expected None without indices"),
    ("extra_k_cache", lambda p: p.array((7, 48, 1, 656), np.uint8), TypeError, "expected None without indices"),
    ("extra_indices", lambda p: p.array((2, 1, 5), np.int32), TypeError, "expected None without indices"),
    ("extra_topk_length", lambda p: p.array((2,), np.int32), TypeError, "expected None without indices"),
    ("num_splits", lambda p: p.array((3,), np.int32), TypeError, "None"),
])
def test_wrong_arguments_over_an_fp8_cache_without_indices(place, argument, value, error, text):
    arguments = dense_fp8(place)
    arguments[argument] = value(place) if callable(value) else value
    named = {"q": "k_cache", "num_splits": META}.get(argument, argument)
    named = "k_cache" if argument == "block_table" and value is None else named
    fails(lambda: flash_mla_with_kvcache(**arguments), named, error, text, place.launches)


@pytest.mark.parametrize("argument", ["attn_sink", "topk_length", "extra_k_cache", "extra_indices",
                                      "extra_topk_length"])
def test_arguments_that_go_with_indices_are_refused_without(place, argument):
    arguments = place.decode(**{argument: place.array((2,), np.int32)})
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, TypeError, "None without indices", place.launches)


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, FP8])
def test_an_fp8_cache_without_the_flag(dtype):
    arguments = Host().decode(k_cache=np.zeros((40, 64, 1, 656), dtype))
    text = f"k_cache of dtype {np.dtype(dtype)}"
    fails(lambda: flash_mla_with_kvcache(**arguments), "is_fp8_kvcache", TypeError, text)


def test_d512_pages_are_one_run_of_bytes(place):
    cache = place.array((40, 65, 1, 584), np.uint8, strides=(65 * 592, 592, 592, 1))
    arguments = sparse(place, d_qk=512, k_cache=cache)
    fails(lambda: flash_mla_with_kvcache(**arguments), "k_cache", ValueError, "expected 584 and 1")


# ---- where the arrays are ----
ARRAYS = ["k_cache", "indices", "attn_sink", "topk_length", "extra_k_cache", "extra_indices", "extra_topk_length",
          "out", "lse", META, "num_splits"]


def full(place):
    """A call with every array."""
    return sparse(place, extra=True, attn_sink=place.array((16,), np.float32), topk_length=place.array((2,), np.int32),
                  extra_topk_length=place.array((2,), np.int32), out=place.array((2, 1, 16, 512)),
                  lse=place.array((2, 16, 1), np.float32), **place.metadata())


@pytest.mark.parametrize("argument", ARRAYS)
def test_arrays_of_two_places(gpu, argument):
    arguments = {**full(Host()), argument: full(gpu)[argument]}
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, TypeError, "CuPy", gpu.events)
    if argument not in ("indices", "topk_length", "extra_indices", "extra_topk_length", META, "num_splits"):
        arguments = {**full(gpu), argument: full(Host())[argument]}  # integers may come from the host
        fails(lambda: flash_mla_with_kvcache(**arguments), argument, TypeError, "NumPy", gpu.events)
    x = full(gpu)[argument]
    arguments = {**full(gpu), argument: gpu.array(x.shape, x.dtype, device=1)}
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, ValueError, "on device 1", gpu.events)


# ---- launches on a GPU (a fake one) ----
@pytest.mark.parametrize("given", [False, True], ids=["plans", "metadata"])
@pytest.mark.parametrize("make", [
    lambda gpu: gpu.decode(), lambda gpu: gpu.decode(batch=1, s_q=2, h_q=128), lambda gpu: dense_fp8(gpu),
    lambda gpu: {**dense_fp8(gpu), "q": gpu.array((2, 1, 64, 576))}, lambda gpu: dense_fp8(gpu, d_qk=512),
    lambda gpu: sparse(gpu, h_q=128, topk=64 * 1000), lambda gpu: sparse(gpu, extra=True),
    lambda gpu: sparse(gpu, h_q=64, extra=True, attn_sink=gpu.array((64,), np.float32)),
], ids=["dense", "dense_rows", "fp8_few", "fp8", "fp8_d512", "codes", "few", "keys"])
def test_calls_on_two_devices_in_turn_use_nothing_of_each_other(gpu, make, given):
    parts = None
    for home in (0, 1, 1, 0, 1):
        gpu.home = home
        arguments = make(gpu)
        flash_mla_with_kvcache(**arguments)
        if given:  # as many parts as the call has planned for
            parts = parts or int(next(launch for launch in gpu.launches if launch.name == SCHED).params["num_sm_parts"])
            flash_mla_with_kvcache(**arguments, **gpu.metadata(arguments["q"].shape[0], parts))
        launches = gpu.take()
        assert len(launches) == (3 if not given else 5) and {launch.device for launch in launches} == {home}
        assert [gpu.devices_of(launch) for launch in launches] == [{home}] * len(launches)
        maps = gpu.maps + gpu.partial_maps
        assert {gpu.device_of(encoded["ptr"]) for encoded in maps} <= {home}
        gpu.maps.clear()
        gpu.partial_maps.clear()


FEW_ROWS, SCHED, COMBINE = "sparse_decode.few_rows_sm90.v32", "sched_meta.sm80", "combine.sm80.bf16"


def test_what_has_no_gpu_kernel_is_refused_with_a_way_out(gpu):
    with pytest.raises(UnsupportedError, match="^indices without is_fp8_kvcache: not supported .*pass NumPy arrays"):
        flash_mla_with_kvcache(**sparse(gpu, fp8=False))
    assert gpu.events == []


@pytest.mark.parametrize("h_q, keys, blocks", [(64, "indices", 1), (65, "crossover", 2), (128, "crossover", 2),
                                               (130, "indices", 3), (256, "crossover", 4)])
def test_two_head_blocks_share_keys(gpu, h_q, keys, blocks):
    with sparse_decode_op.with_crossover():
        flash_mla_with_kvcache(**sparse(gpu, s_q=3, h_q=h_q))
    (decode,) = gpu.take()
    assert decode.name == f"sparse_decode.sm90.v32.{keys}" and decode.grid[:2] == (blocks, 3)


@pytest.mark.parametrize("s_q, h_q, tag", [(1, 64, "paged"), (1, 128, "paged_crossover"), (2, 64, "paged_crossover"),
                                           (3, 64, "paged"), (1, 65, "paged_crossover"), (1, 16, "paged")])
def test_two_row_blocks_share_keys(gpu, s_q, h_q, tag):
    q = gpu.array((2, s_q, h_q, 576))
    with sparse_decode_op.with_crossover():
        flash_mla_with_kvcache(**{**dense_fp8(gpu), "q": q})
    (decode,) = (launch for launch in gpu.take() if launch.name.startswith("sparse_decode"))
    assert decode.name.rpartition(".")[2] == tag


@pytest.mark.parametrize("rows, few_rows, crossover, expected", [
    (1, True, False, "few_"), (16, True, False, "few_"), (17, True, False, ""), (16, False, False, ""),
    (16, True, True, ""), (128, True, True, "crossover"), (128, True, False, "")])
def test_rows_decide_which_kernel(rows, few_rows, crossover, expected):
    names = [sparse_decode_op.variant(sparse, rows, few_rows, False, crossover) for sparse in (True, False)]
    assert names == (["crossover", "paged_crossover"] if expected == "crossover"
                     else [f"{expected}indices", f"{expected}paged"])


@pytest.mark.parametrize("rows, codes, crossover, expected", [
    (16, True, False, ["few_indices", "few_paged"]), (17, True, False, ["codes", "paged_codes"]),
    (128, True, True, ["crossover", "paged_crossover"]), (192, True, True, ["indices", "paged"])])
def test_codes_are_multiplied_where_that_is_faster(rows, codes, crossover, expected):
    assert [sparse_decode_op.variant(sparse, rows, True, codes, crossover) for sparse in (True, False)] == expected


@pytest.mark.parametrize("blocks, h_q, d_qk, path", [(14, 64, 576, "e4m3_sm90"), (13, 64, 576, "sm90"),
                                                     (14, 64, 512, "sm90"), (14, 16, 576, "few_rows_sm90")])
def test_blocks_decide_whether_codes_are_multiplied(gpu, blocks, h_q, d_qk, path):
    parts, topk = 132, 64 * blocks
    batch = 66  # half as many requests as parts: 7 blocks a part with 14 blocks a request
    width = 656 if d_qk == 576 else 584
    cache = gpu.array((40, 64, 1, width), np.uint8, strides=(-(-64 * width // 576) * 576, width, width, 1))
    arguments = {**sparse(gpu), "q": gpu.array((batch, 1, h_q, d_qk)), "k_cache": cache,
                 "indices": gpu.array((batch, 1, topk), np.int32)}
    flash_mla_with_kvcache(**arguments)
    decode = gpu.take()[1]
    assert decode.name.startswith(f"sparse_decode.{path}.") and decode.grid[2] == parts
    for codes in (True, False):
        with sparse_decode_op.with_codes(codes):
            flash_mla_with_kvcache(**arguments)
        forced = gpu.take()[1].name
        assert ("e4m3" in forced) is (codes and "few" not in path and d_qk == 576)


@pytest.mark.parametrize("page_size, whole", [(64, 1), (16, 1), (48, 1), (24, 0), (1, 0), (None, 1)])
def test_boxes_are_copied_where_they_lie_in_pages(gpu, page_size, whole):
    """The copy engine's boxes are 16 tokens; a contiguous cache (None) has one page a request."""
    cache = gpu.array((40 if page_size else 2, page_size or 100, 1, 656), np.uint8)
    arguments = {**dense_fp8(gpu), "q": gpu.array((2, 1, 64, 576)), "k_cache": cache}
    if page_size is None:
        arguments["block_table"] = None
    with sparse_decode_op.with_codes(True):
        flash_mla_with_kvcache(**arguments)
    decode = next(event for event in gpu.take() if getattr(event, "name", "").startswith("sparse_decode.e4m3"))
    assert int(decode.params["whole_boxes"]) == whole and bool(decode.params["k_map"].any()) is bool(whole)


@pytest.mark.parametrize("s_q, h_q, d_qk, few", [(1, 16, 576, True), (4, 4, 576, True), (1, 17, 576, False),
                                                 (2, 16, 576, False), (1, 16, 512, False)])
def test_few_rows_have_a_kernel_of_their_own(gpu, monkeypatch, s_q, h_q, d_qk, few):
    width = 656 if d_qk == 576 else 584
    cache = gpu.array((40, 64, 1, width), np.uint8, strides=(-(-64 * width // 576) * 576, width, width, 1))
    arguments = {**dense_fp8(gpu), "q": gpu.array((2, s_q, h_q, d_qk)), "k_cache": cache}
    with monkeypatch.context() as patch:
        patch.setattr(_select, "_experimental_allowed", False)
        flash_mla_with_kvcache(**arguments)
    decode = gpu.take()[1]
    assert decode.name.startswith(FEW_ROWS) is few and decode.grid == (1, 1, 132)


@pytest.mark.parametrize("make", [sparse, dense_fp8], ids=["indices", "dense"])
def test_few_rows_do_without_a_kernel_that_is_experimental(gpu, monkeypatch, make):
    with monkeypatch.context() as patch:
        patch.setattr(_select, "_experimental_allowed", False)
        for table in (_select._FEW_ROWS_DECODE, _select._PAGED_FEW_ROWS_DECODE):
            for key, spec in table.items():
                patch.setitem(table, key, replace(spec, experimental=True))
        flash_mla_with_kvcache(**make(gpu))
    (decode,) = (launch for launch in gpu.take() if launch.name.startswith("sparse_decode"))
    assert decode.name.startswith("sparse_decode.sm90.")


def test_the_crossover_can_be_asked_for(gpu):
    arguments = sparse(gpu, h_q=128)
    flash_mla_with_kvcache(**arguments)
    with sparse_decode_op.with_crossover():
        flash_mla_with_kvcache(**arguments)
    flash_mla_with_kvcache(**arguments)
    names = [launch.name for launch in gpu.take() if launch.name.startswith("sparse_decode")]
    assert [name.rpartition(".")[2] for name in names] == ["indices", "crossover", "indices"]


@pytest.mark.parametrize("contiguous", [False, True])
def test_dense_decode_over_an_fp8_cache(gpu, contiguous):
    arguments = dense_fp8(gpu, causal=True)
    if contiguous:
        arguments |= dict(k_cache=gpu.array((2, 300, 1, 656), np.uint8), block_table=None)
    flash_mla_with_kvcache(**arguments)
    plan, decode, merge = gpu.take()
    assert [plan.name, decode.name, merge.name] == [SCHED, f"{FEW_ROWS}.few_paged", COMBINE]
    lengths = arguments["cache_seqlens"].data.ptr
    assert plan.params["fixed_seqlen"] == -1 and plan.params["cache_seqlens"] == lengths
    p, table = decode.params, arguments["block_table"]
    assert p["cache_seqlens"] == lengths and p["causal"] == 1
    assert p["block_table"] == (0 if contiguous else table.data.ptr)
    assert p["max_seqlen"] == (300 if contiguous else table.shape[1] * 64)
    assert p["main.num_pages"] == (2 if contiguous else 40)
    assert decode.grid == (1, 1, 132) and p["main.topk"] == p["extra.topk"] == 0


def test_pages_of_a_gpu_cache_begin_at_multiples_of_16_bytes(gpu):
    shifted = gpu.array((40, 64, 1, 656), np.uint8, offset_bytes=8)
    fails(lambda: flash_mla_with_kvcache(**sparse(gpu, k_cache=shifted)), "k_cache", ValueError, "multiples of 16",
          gpu.events)
    odd = gpu.array((40, 64, 1, 656), np.uint8, strides=(64 * 656 + 8, 656, 656, 1))
    fails(lambda: flash_mla_with_kvcache(**sparse(gpu, k_cache=odd)), "k_cache", ValueError, "multiples of 16",
          gpu.events)


def test_a_call_without_metadata_launches_plan_decode_combine(gpu):
    arguments = full(gpu)
    out, lse = flash_mla_with_kvcache(**{**arguments, META: None, "num_splits": None, "out": None, "lse": None})
    plan, decode, merge = gpu.take()
    assert [plan.name, decode.name, merge.name] == [SCHED, f"{FEW_ROWS}.few_indices", COMBINE]
    batch, s_q, h_q = arguments["q"].shape[:3]
    parts = 132 // (s_q * -(-h_q // 64))
    topk, extra = arguments["indices"].shape[-1], arguments["extra_indices"].shape[-1]
    assert plan.params["fixed_seqlen"] == -(-topk // 64) * 64 + extra and plan.params["num_sm_parts"] == parts
    assert decode.grid == (-(-h_q // 64), s_q, parts) and decode.pdl
    p = decode.params
    assert (p["main.topk"], p["extra.topk"], p["h_q"], p["s_q"], p["batch"]) == (topk, extra, h_q, s_q, batch)
    assert p["main.cache"] == arguments["k_cache"].data.ptr and p["main.num_pages"] == 40
    assert p["extra.page_size"] == arguments["extra_k_cache"].shape[1]
    assert p["attn_sink"] == merge.params["attn_sink"] == arguments["attn_sink"].data.ptr
    assert p["o_partial"] == merge.params["o_partial"] != 0 and p["out"] == merge.params["out"] == out.data.ptr
    assert p["lse"] == lse.data.ptr and merge.params["heads_per_kv"] == h_q and merge.params["h_kv"] == 1
    assert merge.grid[1] == min(parts - 1, batch, max(16, 2 * 132 // merge.grid[0]))


@pytest.mark.parametrize("make", [sparse, lambda gpu: sparse(gpu, extra=True, h_q=128), dense_fp8],
                         ids=["indices", "crossover, two lists", "dense"])
def test_a_call_like_an_earlier_one_only_fills_in_pointers(gpu, monkeypatch, make):
    arguments, others = make(gpu), make(gpu)
    flash_mla_with_kvcache(**arguments)
    first = gpu.take()
    assert len(_plans.PLANS) == 1
    monkeypatch.setattr(sparse_decode_op, "prepare", lambda arguments: pytest.fail("checked again"))
    flash_mla_with_kvcache(**others)
    second = gpu.take()
    for one, two in zip(first, second, strict=True):
        assert one.name == two.name and one.grid == two.grid
        for name in one.params.dtype.names:
            is_pointer = one.params.dtype[name] == np.uint64
            assert np.all(one.params[name] == two.params[name]) or is_pointer, name
    (decode,) = (launch for launch in second if launch.name.startswith("sparse_decode"))
    assert decode.params["q"] == others["q"].data.ptr and decode.params["main.cache"] == others["k_cache"].data.ptr
    if others.get("extra_indices") is not None:
        assert decode.params["extra.indices"] == others["extra_indices"].data.ptr


def test_arrays_that_must_be_staged_are_not_planned(gpu):
    flash_mla_with_kvcache(**sparse(gpu, q=gpu.array((2, 1, 16, 576), offset_bytes=2)))
    flash_mla_with_kvcache(**sparse(gpu, topk_length=np.array([3, 4], np.int32)))
    assert not _plans.PLANS


def test_a_plan_does_not_excuse_wrong_scalars(gpu):
    arguments = sparse(gpu)
    flash_mla_with_kvcache(**arguments)
    for name, value, error in (("head_dim_v", 512.0, TypeError), ("is_fp8_kvcache", 1, TypeError),
                               ("causal", 0, TypeError), ("softmax_scale", [0.1], TypeError),
                               ("softmax_scale", float("nan"), ValueError)):
        with pytest.raises(error, match=name):
            flash_mla_with_kvcache(**{**arguments, name: value})


def test_without_an_extra_cache_its_fields_are_zero(gpu):
    flash_mla_with_kvcache(**sparse(gpu, topk=64))
    (decode,) = gpu.take()  # one block a query cannot be split
    assert decode.params["extra.topk"] == decode.params["extra.cache"] == decode.params["o_partial"] == 0


@pytest.mark.parametrize("batch, topk", [(128, 2048), (264, 500), (3, 64)])
@pytest.mark.parametrize("with_length", [False, True])
@pytest.mark.parametrize("with_metadata", [False, True])
def test_lists_of_one_length_that_stay_whole_need_no_plan(gpu, batch, topk, with_length, with_metadata):
    """A plan by their shape cuts none: one launch, without metadata, unless given ones say more of their lengths."""
    arguments = sparse(gpu, batch=batch, h_q=64, topk=topk)
    if with_length:
        arguments["topk_length"] = gpu.array((batch,), np.int32)
    if with_metadata:
        arguments |= gpu.metadata(batch)
    flash_mla_with_kvcache(**arguments)
    decode, *others = gpu.take()
    looks_at_it = with_length and with_metadata and topk > 64
    assert decode.params["metadata"] == (arguments[META].data.ptr if looks_at_it else 0)
    assert (decode.params["o_partial"] != 0) == looks_at_it and decode.grid == (1, 1, 132)
    assert [other.name for other in others] == ([f"{COMBINE}.half"] if looks_at_it else [])


@pytest.mark.parametrize("batch, topk", [(200, 2048), (5, 1000), (133, 1024)])
def test_lists_of_one_length_that_are_split(gpu, batch, topk):
    arguments = sparse(gpu, batch=batch, h_q=64, topk=topk, **gpu.metadata(batch))
    flash_mla_with_kvcache(**arguments)
    decode, merge = gpu.take()
    assert decode.params["metadata"] == merge.params["metadata"] == arguments[META].data.ptr


def test_indices_that_a_kernel_cannot_read_are_staged(gpu):
    wide = gpu.array((2, 1, 1, 64), np.int32)
    flash_mla_with_kvcache(**sparse(gpu, indices=wide))
    assert gpu.take()[-1].params["main.indices"] == wide.data.ptr
    flash_mla_with_kvcache(**sparse(gpu, q=gpu.array((2, 1, 16, 576), offset_bytes=2)))
    copies = [event for event in gpu.events if isinstance(event, tuple) and event[0] == "copy"]
    assert len(copies) == 1 and gpu.take()[-1].params["q"] == copies[0][2].data.ptr


def test_misaligned_device_arrays(gpu):
    arguments = sparse(gpu, indices=gpu.array((2, 1, 64), np.int32, offset_bytes=2))
    fails(lambda: flash_mla_with_kvcache(**arguments), "indices", ValueError, "multiples of the 4-byte", gpu.events)


# ---- results on the host ----
@pytest.mark.parametrize("layout", [V32, D512, None], ids=str)
@pytest.mark.parametrize("s_q", [1, 2, 5])
def test_equals_the_reference(layout, s_q):
    arguments = random_call(s_q=s_q, layout=layout, h_kv=2 if layout is None else 1)
    more = random_call(seed=1, s_q=s_q, layout=layout, topk=133, page_size=48, h_kv=2 if layout is None else 1)
    plain = check(arguments)
    everything = check(arguments, attn_sink=np.linspace(-5, 20, 16, dtype=np.float32), topk_length=[0, 33],
                       extra_k_cache=more["k_cache"], extra_indices=more["indices"], extra_topk_length=[5, -1],
                       softmax_scale=0.1)
    assert not same(plain, everything)
    if layout is None:
        check(dict(arguments, q=arguments["q"].astype(np.float16), k_cache=arguments["k_cache"].astype(np.float16)))


@pytest.mark.parametrize("h_q, h_kv", [(1, 1), (3, 3), (8, 2), (9, 3), (24, 8), (63, 1), (96, 3), (126, 2), (128, 1)])
def test_any_number_of_heads(h_q, h_kv):
    out, _ = check(random_call(h_q=h_q, h_kv=h_kv, layout=None, topk=6))
    assert out.shape == (2, 2, h_q, 512)
    if h_kv == 1:
        check(random_call(h_q=h_q, topk=6))


def test_the_positional_call_form():
    x = random_call()
    lengths = np.array([70, 70], np.int32)
    metadata, num_splits = get_mla_metadata(lengths, 2 * 16 // 1, 1, 16, True, 70)
    got = flash_mla_with_kvcache(x["q"], x["k_cache"], np.zeros((2, 0), np.int32), lengths, 512, metadata, num_splits,
                                 False, True, x["indices"])
    assert same(got, check(x))


def test_block_table_and_lengths_are_not_looked_at_with_indices():
    x = random_call()
    assert same(check(x), check(x, block_table=np.zeros((77, 1), np.float32), cache_seqlens="nothing"))


def test_kinds_of_arrays():
    x = random_call()
    expected = check(x, topk_length=[50, 70])
    indices, lengths = x["indices"], np.repeat(np.array([50, 70]), 2)
    cache = x["k_cache"]
    for change in (dict(indices=indices.tolist()), dict(indices=indices.astype(np.int64)),
                   dict(indices=np.asfortranarray(indices)), dict(indices=np.repeat(indices, 2, axis=2)[:, :, ::2]),
                   dict(indices=indices[:, :, None]), dict(k_cache=cache.view(FP8)), dict(k_cache=cache.view(np.int8)),
                   dict(topk_length=lengths[::2]), dict(q=np.asfortranarray(x["q"])), dict(is_fp8_kvcache=np.True_),
                   dict(causal=np.False_), dict(softmax_scale=576**-0.5)):
        assert same(flash_mla_with_kvcache(**{**x, "topk_length": [50, 70], **change}), expected)
    beyond = np.concatenate([indices, np.full_like(indices[..., :2], 1)], -1).astype(np.int64)
    beyond[..., -2:] = 2**40, -2**63  # name nothing, as they do on a GPU
    assert same(flash_mla_with_kvcache(**{**x, "topk_length": None, "indices": beyond}),
                flash_mla_with_kvcache(**{**x, "topk_length": None}))


def test_page_strides_are_honoured():
    x = random_call()
    expected = check(x)
    pool = np.full((5, 64 * 656 * 2 + 160), 0x7F, np.uint8)
    view = np.lib.stride_tricks.as_strided(pool[:, 64 * 656:], (5, 64, 1, 656), (pool.strides[0], 656, 656, 1))
    view[...] = x["k_cache"]
    assert same(check(x, k_cache=view), expected)
    backwards = 319 - x["indices"] // 64 * 64 - 63 + x["indices"] % 64  # pages in the other order
    indices = np.where((x["indices"] < 0) | (x["indices"] >= 320), -1, backwards)
    assert same(check(x, k_cache=x["k_cache"][::-1], indices=indices), expected)


def test_views_of_results_and_queries():
    x = random_call(h_q=8)
    expected = check(x)
    q, out = np.full((2, 2, 64, 576), np.nan, BF16), np.full((2, 2, 64, 512), 7, BF16)
    lse = np.full((2, 8, 4), 7, np.float32)
    q[:, :, :8] = x["q"]
    got = flash_mla_with_kvcache(**{**x, "q": q[:, :, :8]}, out=out[:, :, :8], lse=lse[:, :, 1:3])
    assert same(got, expected) and same((out[:, :, :8], lse[:, :, 1:3]), expected)
    assert (out[:, :, 8:] == 7).all() and (lse[:, :, ::3] == 7).all()


@pytest.mark.parametrize("lengths", [[0, 70], [70, 0], [-3, 0], [0, -2147483648]])
def test_rows_without_keys(lengths):
    x = random_call()
    out, lse = check(x, topk_length=lengths, attn_sink=np.zeros(16, np.float32))
    for b, length in enumerate(lengths):
        assert length > 0 or ((out[b] == 0).all() and (lse[b] == -np.inf).all())
    out, lse = check(x, indices=np.full_like(x["indices"], -1))
    assert (out == 0).all() and (lse == -np.inf).all()


def test_empty_pools_and_batches():
    for cache in (np.empty((0, 64, 1, 656), np.uint8), np.empty((3, 0, 1, 656), np.uint8)):
        x = dict(random_call(), k_cache=cache)
        out, lse = flash_mla_with_kvcache(**x, attn_sink=np.zeros(16, np.float32))
        assert (out == 0).all() and (lse == -np.inf).all()
        with_extra = flash_mla_with_kvcache(**x, extra_k_cache=random_call()["k_cache"], extra_indices=x["indices"])
        assert same(with_extra, check(random_call()))
    for batch, s_q in ((0, 1), (2, 0)):
        out, lse = flash_mla_with_kvcache(**random_call(batch=batch, s_q=s_q))
        assert out.shape == (batch, s_q, 16, 512) and lse.shape == (batch, 16, s_q)


@pytest.mark.parametrize("scale", [None, 0.01, 1.0, 0.1352337788608801])
def test_two_selections_merge_to_the_whole(scale):
    x = random_call(topk=100)
    whole = check(x, softmax_scale=scale)
    parts = [check(x, indices=part, softmax_scale=scale) for part in (x["indices"][..., :37], x["indices"][..., 37:])]
    out, lse = merge_states([out for out, _ in parts], [lse for _, lse in parts])
    np.testing.assert_allclose(lse, whole[1], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(out.astype(np.float64), whole[0].astype(np.float64), rtol=0.03, atol=0.03)


# ---- dense over an FP8 cache ----
@pytest.mark.parametrize("layout", [V32, D512], ids=str)
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("page_size", [64, 5])
def test_dense_over_an_fp8_cache(layout, causal, page_size):
    x = random_call(batch=3, s_q=3, layout=layout, pages=12, page_size=page_size)
    table = np.arange(12, dtype=np.int32).reshape(3, 4)[:, ::-1].copy()
    lengths = np.array([2, 0, 3 * page_size + 1], np.int32)
    table[0, 1:] = table[1] = -1
    got = flash_mla_with_kvcache(x["q"], x["k_cache"], table, lengths, 512, None, None, causal, True)
    exact = sparse_decode.attend_paged(x["q"], x["k_cache"], table, lengths, causal=causal)
    assert same(got, (cast(exact[0], BF16), exact[1].astype(np.float32)))
    assert (got[0][1] == 0).all() and (got[1][1] == -np.inf).all() and (got[0][2] != 0).any()
    values = kv_quant.dequantize(x["k_cache"], layout, dtype=np.float32).astype(BF16)
    if page_size == 64:
        near = flash_mla_with_kvcache(x["q"], values, table, lengths, 512, causal=causal)
        np.testing.assert_allclose(got[0].astype(np.float64), near[0].astype(np.float64), rtol=0.03, atol=0.03)
    wider = np.concatenate([table, np.full((3, 3), 2147480000, np.int32)], axis=1)
    assert same(flash_mla_with_kvcache(x["q"], x["k_cache"], wider, lengths, 512, None, None, causal, True), got)


def test_contiguous_fp8_cache():
    x = random_call(batch=5, pages=5)
    got = flash_mla_with_kvcache(x["q"], x["k_cache"], None, [64, 0, 3, 99, 1], 512, is_fp8_kvcache=True)
    exact = sparse_decode.attend_paged(x["q"], x["k_cache"], None, np.array([64, 0, 3, 64, 1]))
    assert same(got, (cast(exact[0], BF16), exact[1].astype(np.float32)))


def test_a_numpy_false_is_a_dense_call():
    x = random_call(batch=5, layout=None)
    got = flash_mla_with_kvcache(x["q"], x["k_cache"], None, [64] * 5, 512, is_fp8_kvcache=np.False_)
    assert same(got, flash_mla_with_kvcache(x["q"], x["k_cache"], None, [64] * 5, 512))


# ---- metadata ----
def test_metadata_of_sparse_calls():
    lengths = np.array([0, 5, -3, 70000], np.int32)
    for topk in (1, 64, 2048, 2176):
        got = get_mla_metadata(lengths, 128, 1, 128, True, topk)
        assert same(got, sched_meta.plan(np.full(4, topk), 66, overhead_blocks=1))
        assert same(got, get_mla_metadata(lengths[::-1], 128, 1, topk=topk))
    many = np.zeros(34, np.int32)  # more than half as many as the parts
    expected = sched_meta.plan(np.full(34, 2048), 66, overhead_blocks=4)
    assert same(get_mla_metadata(many, 128, 1, 128, True, 2048), expected)
    assert same(get_mla_metadata(lengths, 128, 1, 128, True), get_mla_metadata(lengths, 128, 1, 128, False))


@pytest.mark.parametrize("nothing", [dict(s_q=0), dict(pages=0), dict(batch=0)], ids=str)
def test_a_call_of_nothing_needs_no_workspace(gpu, nothing):
    for place in (Host(), gpu):
        out, lse = flash_mla_with_kvcache(**sparse(place, topk=300, workspace=place.array((0,), np.uint8), **nothing))
        assert out.size == 0 or "pages" in nothing
    assert not [event for event in gpu.events if not isinstance(event, tuple)]  # a launch


@pytest.mark.parametrize("batch, h_q", [(128, 16), (128, 64), (130, 8), (7, 128)])
def test_a_workspace_is_enough_whatever_the_plan(batch, h_q):
    """Dense plans of 128 requests have fewer parts than sparse ones."""
    workspace = np.zeros(mla_workspace_bytes(batch, 1, h_q), np.uint8)
    out, _ = flash_mla_with_kvcache(**sparse(Host(), batch=batch, h_q=h_q, topk=128, workspace=workspace))
    assert out.shape == (batch, 1, h_q, 512)
