"""The runtime on a GPU: load, launch with cluster and PDL, capture, threads, processes, devices, tensor maps."""

from __future__ import annotations

import dataclasses
import os
import subprocess
import sys
import textwrap
import threading

import ml_dtypes
import numpy as np
import pytest

from flashmla_cupy.errors import CaptureError, FlashMLAError
from flashmla_cupy.runtime import compile as rt_compile
from flashmla_cupy.runtime import device, params, tensor_map
from flashmla_cupy.runtime.spec import KernelSpec
from tests.common import REPO, TOY

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        device.gpu_available() and device.info(0).compute_capability != (9, 0), reason="the toy kernels are for sm_90a"
    ),
]


def toy_params(lse, batch: int = 256, scale: float = 3.0) -> np.ndarray:
    record = params.new("CombineParams")
    record["lse"], record["batch"], record["lse_in_scale"] = lse.data.ptr, batch, scale
    return record


def edit(path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize("pdl", [False, True])
def test_launch(toy_src, pdl):
    import cupy

    lse = cupy.full(256, cupy.nan, cupy.float32)
    kernel = rt_compile.get_kernel(TOY)
    assert kernel is rt_compile.get_kernel(TOY)
    kernel.launch((2, 1, 1), toy_params(lse, 200), pdl=pdl)
    result = cupy.asnumpy(lse)
    assert (result[:200] == 3).all() and np.isnan(result[200:]).all()


def test_cluster_attribute_reaches_the_kernel(toy_src):
    import cupy

    (toy_src / "toy/value.cuh").write_text(
        "#pragma once\nnamespace flashmla::toy { inline float value() {\n"
        '  unsigned size, rank; asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(size));\n'
        '  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)); return size * 10 + rank;\n} }\n'
    )
    lse = cupy.zeros(256, cupy.float32)
    rt_compile.get_kernel(TOY).launch((2, 1, 1), toy_params(lse, scale=1.0))
    assert (cupy.asnumpy(lse).reshape(2, 128) == np.array([[20], [21]])).all()


def test_pdl_chain_keeps_the_order(toy_src):
    """Each launch adds one to what its predecessor wrote, after griddepcontrol.wait."""
    import cupy

    edit(toy_src / "toy/kernel_sm90.cuh", "if (i <", 'asm volatile("griddepcontrol.wait;" ::: "memory");\n  if (i <')
    edit(toy_src / "toy/kernel_sm90.cuh", "= value()", "= params.lse[i] + value()")
    lse = cupy.zeros(256, cupy.float32)
    kernel, record = rt_compile.get_kernel(TOY), toy_params(lse, scale=1.0)
    stream = cupy.cuda.Stream(non_blocking=True)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        for _ in range(500):
            kernel.launch((2, 1, 1), record, pdl=True)
    stream.synchronize()
    assert (cupy.asnumpy(lse) == 500).all()


def test_driver_error_is_readable(toy_src):
    import cupy

    lse = cupy.zeros(256, cupy.float32)
    with pytest.raises(FlashMLAError, match=r"launch of toy.sm90.f32.n128, grid \(3, 1, 1\), .*: CUDA_ERROR_\w+ \("):
        rt_compile.get_kernel(TOY).launch((3, 1, 1), toy_params(lse))  # no multiple of the cluster
    rt_compile.get_kernel(TOY).launch((2, 1, 1), toy_params(lse))
    assert (cupy.asnumpy(lse) == 3).all()


def test_kernel_for_another_architecture(toy_src):
    with pytest.raises(FlashMLAError, match=r"toy.sm90.f32.n128: cannot be loaded on device 0 \(sm_90a; .*sm_100a"):
        rt_compile.get_kernel(dataclasses.replace(TOY, arch="sm_100a"))


def test_capture(toy_src):
    import cupy

    stream = cupy.cuda.Stream(non_blocking=True)
    lse = cupy.zeros(256, cupy.float32)
    cupy.cuda.get_current_stream().synchronize()
    with stream:
        stream.begin_capture()
        assert device.is_capturing(stream.ptr)
        with pytest.raises(CaptureError, match="flashmla-cupy cache warmup"):
            rt_compile.get_kernel(TOY)
        stream.end_capture()
        kernel = rt_compile.get_kernel(TOY)
        assert not device.is_capturing(stream.ptr)
        stream.begin_capture()
        rt_compile.get_kernel(TOY).launch((2, 1, 1), toy_params(lse))
        graph = stream.end_capture()
    assert kernel is rt_compile.get_kernel(TOY)
    assert (cupy.asnumpy(lse) == 0).all()
    graph.launch(stream)
    stream.synchronize()
    assert (cupy.asnumpy(lse) == 3).all()


def test_header_edit_changes_the_result(toy_src):
    import cupy

    lse = cupy.zeros(256, cupy.float32)
    rt_compile.get_kernel(TOY).launch((2, 1, 1), toy_params(lse))
    assert (cupy.asnumpy(lse) == 3).all()
    edit(toy_src / "toy/value.cuh", "1.f", "5.f")
    rt_compile.forget()
    rt_compile.get_kernel(TOY).launch((2, 1, 1), toy_params(lse))
    assert (cupy.asnumpy(lse) == 15).all()


def test_threads_share_a_kernel(toy_src):
    import cupy

    kernel, count = rt_compile.get_kernel(TOY), 300
    outputs = [cupy.zeros((count, 256), cupy.float32) for _ in range(4)]
    cupy.cuda.get_current_stream().synchronize()
    failures = []

    def work(index: int) -> None:
        try:
            stream = cupy.cuda.Stream(non_blocking=True)
            for row in range(count):
                kernel.launch((2, 1, 1), toy_params(outputs[index][row], scale=index + row), stream_ptr=stream.ptr)
            stream.synchronize()
        except Exception as error:  # shown by the assertion below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for index, output in enumerate(outputs):
        assert (cupy.asnumpy(output) == (index + np.arange(count))[:, None]).all()


def test_fork_after_import(toy_src):
    """Importing initialises nothing, so a forked child (and then its parent) can use the GPU."""
    code = f"""
        import os
        import numpy as np
        import cupy, flashmla_cupy
        from flashmla_cupy.runtime import compile, params, tensor_map, device
        from flashmla_cupy.runtime.spec import KernelSpec
        child = os.fork()
        lse = cupy.zeros(256, cupy.float32)
        record = params.new("CombineParams")
        record["lse"], record["batch"], record["lse_in_scale"] = lse.data.ptr, 256, 3
        compile.get_kernel({TOY!r}).launch((2, 1, 1), record)
        assert (cupy.asnumpy(lse) == 3).all()
        if child == 0:
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
    """
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.returncode == 0, result.stderr


def test_several_devices(toy_src):
    import cupy

    if cupy.cuda.runtime.getDeviceCount() < 2:
        pytest.skip("one GPU")
    kernels = []
    for index in range(2):
        with cupy.cuda.Device(index):
            lse = cupy.zeros(256, cupy.float32)
            kernels.append(rt_compile.get_kernel(TOY))
            kernels[-1].launch((2, 1, 1), toy_params(lse))
            assert (cupy.asnumpy(lse) == 3).all()
    assert kernels[0] is not kernels[1]


TMA_TOY = """\
#pragma once
#include "common/params.cuh"
namespace flashmla::toy {
struct Config { static constexpr int kThreads = 128, kMinBlocks = 1, kClusterX = 1, kSmemBytes = 16 * 128 + 16; };
// Loads the box at (0, page_size) of k_map, 16 rows of 64 bf16, and copies it to out as it lies in shared memory.
template <class Config> __device__ void kernel(const DenseDecodeParams& params) {
  extern __shared__ __align__(1024) unsigned char smem[];
  const unsigned box = __cvta_generic_to_shared(smem), barrier = box + 16 * 128;
  if (threadIdx.x == 0) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 2048;" :: "r"(barrier) : "memory");
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes "
                 "[%0], [%1, {%2, %3}], [%4];"
                 :: "r"(box), "l"(&params.k_map), "r"(0), "r"(params.page_size), "r"(barrier) : "memory");
  }
  __syncthreads();
  asm volatile("{ .reg .pred done; wait: mbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0; @!done bra wait; }"
               :: "r"(barrier) : "memory");
  for (int i = threadIdx.x; i < 16 * 64; i += 128) ((uint16_t*)params.out)[i] = ((uint16_t*)smem)[i];
}
}
"""


@pytest.mark.parametrize("swizzle_bytes", [0, 128])
@pytest.mark.parametrize("row", [0, 3, 40])  # of 50: the last box is out of bounds from row 50 on, which reads as zero
def test_tensor_map(toy_src, swizzle_bytes, row):
    import cupy

    (toy_src / "toy/kernel_tma.cuh").write_text(TMA_TOY)
    spec = KernelSpec("toy", "tma", (), (), "DenseDecodeParams")
    host = np.random.default_rng(0).standard_normal((50, 80)).astype(ml_dtypes.bfloat16)  # rows of 80, box of 64
    source, out = cupy.asarray(host.view(np.uint16)), cupy.full((16, 64), 0xFFFF, cupy.uint16)
    record = params.new("DenseDecodeParams")
    record["k_map"] = tensor_map.encode(
        source.data.ptr, "bfloat16", (80, 50), (160,), (64, 16), swizzle_bytes=swizzle_bytes
    )
    record["out"], record["page_size"] = out.data.ptr, row
    rt_compile.get_kernel(spec).launch((1, 1, 1), record)
    expected = np.zeros((16, 64), np.uint16)
    rows = host[row : row + 16, :64].view(np.uint16)
    expected[: len(rows)] = rows
    if swizzle_bytes:  # 16-byte chunk c of row r lies in place c ^ (r mod 8)
        chunks = expected.reshape(16, 8, 8)
        r, c = np.mgrid[:16, :8]
        expected = chunks[r, c ^ (r % 8)].reshape(16, 64)
    assert (cupy.asnumpy(out) == expected).all()


def test_tensor_map_is_cached():
    import cupy

    buffer = cupy.zeros((64, 64), cupy.float16)
    arguments = (buffer.data.ptr, "float16", (64, 64), (128,), (64, 64))
    assert tensor_map.encode(*arguments) is tensor_map.encode(*arguments)
    assert tensor_map.encode(*arguments).shape == (128,) and tensor_map.encode(*arguments).dtype == np.uint8


def test_device_info():
    facts = device.info()
    assert facts.arch == "sm_90a" and facts.sm_count > 1 and facts.smem_optin_bytes >= 227 * 1024
    assert device.info(0) is device.info(0)


def test_host_time_of_a_launch(toy_src):
    """A loose bound; `bench --host` prints the number."""
    import time

    import cupy

    lse = cupy.zeros(256, cupy.float32)
    kernel, record = rt_compile.get_kernel(TOY), toy_params(lse)
    best = float("inf")
    for _ in range(5):
        cupy.cuda.get_current_stream().synchronize()
        started = time.perf_counter()
        for _ in range(100):
            kernel.launch((2, 1, 1), record)
        best = min(best, (time.perf_counter() - started) / 100)
    assert best < 50e-6
