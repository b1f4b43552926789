# ruff: noqa: F811 (the gpu fixture)
"""Every wrong argument raises before anything is launched, and the message begins with the argument's name."""

from __future__ import annotations

import re

import cupy
import numpy as np
import pytest
from fake_gpu import BF16, H200, FakeGpu, gpu  # noqa: F401

from flashmla_cupy import UnsupportedError, flash_mla_with_kvcache, get_mla_metadata, merge_states
from flashmla_cupy.ops.dense_decode import mla_workspace_bytes

META = "tile_scheduler_metadata"
MESSAGE = re.compile(r"^(\w+): got .+, expected .+", re.DOTALL)


class Host:
    """Makes NumPy arrays with the calls of FakeGpu."""

    def array(self, shape, dtype=BF16, offset_bytes=0, strides=None):
        dtype = np.dtype(dtype)
        array = np.zeros(int(np.prod(shape)) * dtype.itemsize * 2 + offset_bytes + 64, np.uint8)[offset_bytes:]
        if strides is not None:
            return np.lib.stride_tricks.as_strided(array[:dtype.itemsize].view(dtype), shape, strides)
        return array[:int(np.prod(shape)) * dtype.itemsize].view(dtype).reshape(shape)

    decode, metadata, launches = FakeGpu.decode, FakeGpu.metadata, ()


@pytest.fixture(params=["host", "gpu"])
def place(request, gpu):
    return Host() if request.param == "host" else gpu


def fails(call, argument, error, got_what, events=()):
    with pytest.raises(error) as caught:
        call()
    match = MESSAGE.match(str(caught.value))
    assert match and match[1] == argument, str(caught.value)
    assert got_what in str(caught.value), str(caught.value)
    assert list(events) == [], "something was done before the check"


BAD_DECODE = [  # argument, its value (or a function of the place), error, part of the message
    ("q", lambda p: p.array((2, 1, 16, 576), np.float32), TypeError, "dtype float32"),
    ("q", lambda p: p.array((2, 1, 16, 576), np.int16), TypeError, "dtype int16"),
    ("q", lambda p: p.array((2, 16, 576)), ValueError, "shape (2, 16, 576)"),
    ("q", lambda p: p.array((2, 1, 16, 192)), ValueError, "head dimension 192"),
    ("q", lambda p: p.array((2, 1, 0, 576)), ValueError, "0 heads"),
    ("q", [[1.0]], TypeError, "list"),
    ("q", None, TypeError, "None"),
    ("k_cache", lambda p: p.array((40, 64, 1, 576), np.float16), TypeError, "dtype float16, expected bfloat16"),
    ("k_cache", lambda p: p.array((40, 64, 1, 512)), ValueError, "head dimension 512"),
    ("k_cache", lambda p: p.array((40, 64, 576)), ValueError, "shape (40, 64, 576)"),
    ("k_cache", lambda p: p.array((40, 48, 1, 576)), ValueError, "page size 48"),
    ("k_cache", lambda p: p.array((40, 512, 1, 576)), ValueError, "page size 512"),
    ("k_cache", lambda p: p.array((40, 64, 0, 576)), ValueError, "0 heads"),
    ("k_cache", None, TypeError, "None"),
    ("k_cache", [1, 2], TypeError, "list"),
    ("block_table", lambda p: p.array((2, 8), np.float32), TypeError, "dtype float32"),
    ("block_table", lambda p: p.array((2, 8), bool), TypeError, "dtype bool"),
    ("block_table", lambda p: p.array((8,), np.int32), ValueError, "shape (8,)"),
    ("block_table", lambda p: p.array((3, 8), np.int32), ValueError, "3 rows"),
    ("block_table", "pages", TypeError, "'pages'"),
    ("block_table", [[1], [2, 3]], (ValueError, TypeError), "got "),
    ("cache_seqlens", lambda p: p.array((2,), np.float64), TypeError, "dtype float64"),
    ("cache_seqlens", lambda p: p.array((3,), np.int32), ValueError, "shape (3,)"),
    ("cache_seqlens", lambda p: p.array((2, 1), np.int32), ValueError, "shape (2, 1)"),
    ("cache_seqlens", None, TypeError, "None"),
    ("cache_seqlens", 7, TypeError, "7"),
    ("cache_seqlens", [1.5, 2.0], TypeError, "float64"),
    ("cache_seqlens", [2**31, 2], ValueError, "2147483648"),
    ("head_dim_v", 576, ValueError, "576"),
    ("head_dim_v", "512", TypeError, "'512'"),
    ("head_dim_v", 512.0, TypeError, "512.0"),
    ("head_dim_v", True, TypeError, "True"),
    ("causal", 0.0417, TypeError, "0.0417"),
    ("causal", None, TypeError, "None"),
    ("causal", 1, TypeError, "1"),
    ("softmax_scale", 0.0, ValueError, "0.0"),
    ("softmax_scale", -1.0, ValueError, "-1.0"),
    ("softmax_scale", float("nan"), ValueError, "nan"),
    ("softmax_scale", float("inf"), ValueError, "inf"),
    ("softmax_scale", "1", TypeError, "'1'"),
    ("softmax_scale", True, TypeError, "True"),
    ("softmax_scale", np.ones(2), TypeError, "array"),
    ("out", lambda p: p.array((2, 1, 16, 512), np.float32), TypeError, "dtype float32"),
    ("out", lambda p: p.array((2, 1, 16, 576)), ValueError, "shape (2, 1, 16, 576)"),
    ("out", lambda p: p.array((2, 16, 512)), ValueError, "shape (2, 16, 512)"),
    ("out", lambda p: p.array((2, 1, 16, 512), strides=(0, 0, 1024, 2)), ValueError, "overlap"),
    ("out", lambda p: p.array((2, 1, 16, 512), strides=(16384, 16384, 512, 2)), ValueError, "overlap"),
    ("lse", lambda p: p.array((2, 16, 1), BF16), TypeError, "dtype bfloat16"),
    ("lse", lambda p: p.array((2, 1, 16), np.float32), ValueError, "shape (2, 1, 16)"),
    ("lse", lambda p: p.array((2, 16, 1), np.float32, strides=(64, 0, 4)), ValueError, "overlap"),
]


@pytest.mark.parametrize("argument, value, error, text", BAD_DECODE)
def test_decode(place, argument, value, error, text):
    arguments = place.decode()
    arguments[argument] = value(place) if callable(value) else value
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, error, text, place.launches)


@pytest.mark.parametrize("h_q, h_kv", [(16, 3), (1, 2), (100, 3)])
def test_heads_that_do_not_divide(place, h_q, h_kv):
    fails(lambda: flash_mla_with_kvcache(**place.decode(h_q=h_q, h_kv=h_kv)), "q", ValueError, f"{h_q} heads")


def test_contiguous_cache_of_another_batch(place):
    arguments = dict(place.decode(), block_table=None)
    fails(lambda: flash_mla_with_kvcache(**arguments), "k_cache", ValueError, "batch 40 with block_table=None")


@pytest.mark.parametrize("change, argument, error, text", [
    (lambda p, m: dict(m, num_splits=None), "num_splits", TypeError, "None"),
    (lambda p, m: dict(m, tile_scheduler_metadata=None), "tile_scheduler_metadata", TypeError, "None"),
    (lambda p, m: dict(m, num_splits=p.array((2,), np.int32)), "num_splits", ValueError, "shape (2,)"),
    (lambda p, m: dict(m, num_splits=p.array((3,), np.float32)), "num_splits", TypeError, "float32"),
    (lambda p, m: {**m, META: p.array((132, 7), np.int32)}, META, ValueError, "7"),
    (lambda p, m: {**m, META: p.array((0, 8), np.int32)}, META, ValueError, "(0, 8), expected 1 to 65535 rows"),
    (lambda p, m: {**m, META: p.array((65536, 8), np.int32)}, META, ValueError, "(65536, 8), expected 1 to 65535 rows"),
    (lambda p, m: {**m, META: p.array((8,), np.int32)}, META, ValueError, "(8,)"),
    (lambda p, m: {**m, META: p.array((132, 8), np.float32)}, META, TypeError, "float32"),
])
def test_metadata_of_a_decode_call(place, change, argument, error, text):
    arguments = {**place.decode(), **change(place, place.metadata())}
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, error, text, place.launches)


# ---- where the arrays are ----
@pytest.mark.parametrize("argument", ["k_cache", "out", "lse", "workspace"])
def test_host_array_beside_device_q(gpu, argument):
    arguments = gpu.decode(out=gpu.array((2, 1, 16, 512)), lse=gpu.array((2, 16, 1), np.float32), workspace=None)
    arguments[argument] = np.zeros((2, 16, 1), np.float32)
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, TypeError, "NumPy float32 array", gpu.events)


@pytest.mark.parametrize("argument", ["k_cache", "block_table", "cache_seqlens", "out", "lse", "workspace"])
def test_device_array_beside_host_q(gpu, argument):
    arguments = {**Host().decode(), argument: gpu.array((2, 2), np.int32)}
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, TypeError, "CuPy int32 array", gpu.events)


@pytest.mark.parametrize("argument", ["k_cache", "block_table", "cache_seqlens", "out", "lse", "workspace",
                                      "tile_scheduler_metadata", "num_splits"])
def test_array_on_another_device(gpu, argument):
    arguments = gpu.decode(out=gpu.array((2, 1, 16, 512)), lse=gpu.array((2, 16, 1), np.float32), **gpu.metadata(),
                           workspace=gpu.array((mla_workspace_bytes(2, 1, 16),), np.uint8))
    x = arguments[argument]
    arguments[argument] = gpu.array(x.shape, x.dtype, device=1)
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, ValueError, "on device 1", gpu.events)


def test_read_only_output():
    out = np.zeros((2, 1, 16, 512), BF16)
    out.flags.writeable = False
    fails(lambda: flash_mla_with_kvcache(**Host().decode(out=out)), "out", ValueError, "read-only")


# ---- layouts that the kernels cannot read ----
@pytest.mark.parametrize("make, text", [
    (lambda g: g.array((40, 64, 1, 576), offset_bytes=2), "address"),
    (lambda g: g.array((40, 64, 1, 576), offset_bytes=1), "element"),
    (lambda g: g.array((40, 64, 1, 578))[..., :576], "token stride"),
    (lambda g: g.array((40, 64, 1, 1152))[..., ::2], "last axis"),
    (lambda g: g.array((40, 64, 1, 576), strides=(64 * 1152 + 2, 1152, 1152, 2)), "page stride"),
    (lambda g: g.array((40, 64, 2, 576), strides=(64 * 1160, 2320, 1154, 2)), "head stride"),
    (lambda g: g.array((40, 64, 1, 576))[::-1], "page stride"),
    (lambda g: g.array((40, 64, 1, 576), strides=(0, 1152, 1152, 2)), "page stride"),
])
def test_cache_layouts(gpu, make, text):
    k_cache = make(gpu)
    arguments = dict(gpu.decode(), k_cache=k_cache)
    arguments["q"] = gpu.array((2, 1, 16, 576))
    fails(lambda: flash_mla_with_kvcache(**arguments), "k_cache", ValueError, text, gpu.events)


@pytest.mark.parametrize("argument, make", [
    ("q", lambda g: g.array((2, 1, 16, 576), offset_bytes=1)),
    ("q", lambda g: g.array((2, 1, 16, 576), strides=(18433, 18433, 1152, 2))),
    ("cache_seqlens", lambda g: g.array((2,), np.int32, offset_bytes=2)),
    ("block_table", lambda g: g.array((2, 8), np.int32, offset_bytes=3)),
    ("out", lambda g: g.array((2, 1, 16, 512), offset_bytes=1)),
    ("lse", lambda g: g.array((2, 16, 1), np.float32, offset_bytes=2)),
])
def test_elements_off_their_natural_boundary(gpu, argument, make):
    arguments = {**gpu.decode(), argument: make(gpu)}
    fails(lambda: flash_mla_with_kvcache(**arguments), argument, ValueError, "multiples of the", gpu.events)


def test_out_with_a_strided_last_axis(gpu):
    out = gpu.array((2, 1, 16, 1024))[..., ::2]
    fails(lambda: flash_mla_with_kvcache(**gpu.decode(out=out)), "out", ValueError, "along the last axis", gpu.events)


@pytest.mark.parametrize("make, error, text", [
    (lambda g, n: g.array((n - 16,), np.uint8), ValueError, "bytes, expected at least"),
    (lambda g, n: g.array((n,), np.int32), TypeError, "dtype int32"),
    (lambda g, n: g.array((n // 4, 4), np.uint8), ValueError, "expected 1 axes"),
    (lambda g, n: g.array((2 * n,), np.uint8)[::2], ValueError, "contiguous"),
    (lambda g, n: g.array((n,), np.uint8, offset_bytes=8), ValueError, "address"),
])
def test_workspace(gpu, make, error, text):
    workspace = make(gpu, mla_workspace_bytes(2, 1, 16))
    arguments = gpu.decode(dtype=np.float16, workspace=workspace)  # whose partial results are the largest
    fails(lambda: flash_mla_with_kvcache(**arguments), "workspace", error, text, gpu.events)


def test_workspace_bytes_arguments(gpu):
    fails(lambda: mla_workspace_bytes(-1, 1, 16), "batch", ValueError, "-1")
    fails(lambda: mla_workspace_bytes(1, 1, 16, 0), "h_kv", ValueError, "0")
    fails(lambda: mla_workspace_bytes(1, 1, 16, 1, 0), "num_sm_parts", ValueError, "0")


def test_device_without_a_kernel(gpu):
    import dataclasses

    gpu.info = dataclasses.replace(H200, name="NVIDIA A100", compute_capability=(8, 0), arch="sm_80")
    with pytest.raises(UnsupportedError, match="compute capability: got 8.0.*pass NumPy arrays"):
        flash_mla_with_kvcache(**gpu.decode())
    assert gpu.events == []


# ---- get_mla_metadata ----
@pytest.mark.parametrize("argument, value, error, text", [
    ("cache_seqlens", lambda p: p.array((4,), np.float32), TypeError, "float32"),
    ("cache_seqlens", lambda p: p.array((4, 1), np.int32), ValueError, "(4, 1)"),
    ("cache_seqlens", None, TypeError, "None"),
    ("cache_seqlens", 5, TypeError, "5"),
    ("num_q_tokens_per_head_k", -1, ValueError, "-1"),
    ("num_q_tokens_per_head_k", 128.0, TypeError, "128.0"),
    ("num_q_tokens_per_head_k", 127, ValueError, "127, expected a multiple of num_heads_q // num_heads_k = 2"),
    ("num_heads_k", 0, ValueError, "0"),
    ("num_heads_k", None, TypeError, "None"),
    ("num_heads_q", 3, ValueError, "3"),
    ("num_heads_q", "64", TypeError, "'64'"),
    ("is_fp8_kvcache", 1, TypeError, "1"),
    ("topk", -1, ValueError, "-1"),
    ("topk", 2.5, TypeError, "2.5"),
])
def test_get_mla_metadata(place, argument, value, error, text):
    arguments = dict(cache_seqlens=place.array((4,), np.int32), num_q_tokens_per_head_k=128, num_heads_k=2,
                     num_heads_q=4, is_fp8_kvcache=False, topk=None)
    arguments[argument] = value(place) if callable(value) else value
    fails(lambda: get_mla_metadata(**arguments), argument, error, text, place.launches)


# ---- merge_states ----
@pytest.mark.parametrize("outs, lses, argument, error, text", [
    (lambda p: p.array((2, 5, 8), np.float64), lambda p: p.array((2, 5), np.float32), "outs", TypeError, "float64"),
    (lambda p: p.array((2, 5, 6), np.float32), lambda p: p.array((2, 5), np.float32), "outs", ValueError, "(5, 6)"),
    (lambda p: p.array((2,), np.float32), lambda p: p.array((2,), np.float32), "outs", ValueError, "(2,)"),
    (lambda p: p.array((2, 5, 8), np.float32), lambda p: p.array((2, 5), BF16), "lses", TypeError, "bfloat16"),
    (lambda p: p.array((2, 5, 8), np.float32), lambda p: p.array((2, 4), np.float32), "lses", ValueError, "(4,)"),
    (lambda p: p.array((2, 5, 8), np.float32), lambda p: p.array((3, 5), np.float32), "lses", ValueError, "3"),
    (lambda p: p.array((2, 1, 2, 3, 8), np.float32), lambda p: p.array((2, 1, 2, 3), np.float32), "lses", ValueError,
     "(1, 2, 3), expected (1, 3, 2)"),
    (lambda p: [], lambda p: [], "outs", ValueError, "no partial results"),
    (lambda p: p.array((0, 5, 8), np.float32), lambda p: p.array((0, 5), np.float32), "outs", ValueError, "no partial"),
    (lambda p: 3, lambda p: [], "outs", TypeError, "3"),
    (lambda p: [p.array((5, 8), np.float32), p.array((6, 8), np.float32)], lambda p: [p.array((5,), np.float32)] * 2,
     "outs", ValueError, "(6, 8)"),
    (lambda p: [p.array((5, 8), np.float32), p.array((5, 8))], lambda p: [p.array((5,), np.float32)] * 2, "outs",
     TypeError, "bfloat16"),
    (lambda p: [1, 2], lambda p: [1, 2], "outs", TypeError, "1"),
])
def test_merge_states(place, outs, lses, argument, error, text):
    fails(lambda: merge_states(outs(place), lses(place)), argument, error, text, place.launches)


def test_merge_states_in_two_places(gpu):
    device, host = gpu.array((2, 5, 8), np.float32), np.zeros((2, 5, 8), np.float32)
    fails(lambda: merge_states(device, host[..., 0]), "lses", TypeError, "NumPy", gpu.events)
    fails(lambda: merge_states(host, device[..., 0]), "lses", TypeError, "CuPy", gpu.events)
    other = gpu.array((2, 5), np.float32, device=1)
    fails(lambda: merge_states(device, other), "lses", ValueError, "device 1", gpu.events)


def test_arrays_that_cannot_be_shared(gpu, monkeypatch):
    class Broken:
        shape, dtype = (2, 1, 16, 576), "bfloat16"

        def __dlpack_device__(self):
            return 2, 0

        def __dlpack__(self, **arguments):
            raise BufferError("requires gradient")

    monkeypatch.setattr(cupy, "from_dlpack", lambda x: x.__dlpack__())

    class OnTpu(Broken):
        def __dlpack_device__(self):
            return 99, 0

    arguments = dict(gpu.decode(), k_cache=Broken())
    fails(lambda: flash_mla_with_kvcache(**arguments), "k_cache", TypeError, "requires gradient")
    fails(lambda: flash_mla_with_kvcache(**dict(gpu.decode(), q=OnTpu())), "q", TypeError, "device type 99")
    assert type(gpu.array((2,))) is cupy.ndarray
