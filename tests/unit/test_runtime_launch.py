"""launch, tensor_map, driver, device: what can be held without a driver; tests/gpu has the rest."""

from __future__ import annotations

import ctypes
import threading
from types import SimpleNamespace

import pytest

from flashmla_cupy.errors import CaptureError, FlashMLAError, KernelCompileError, UnsupportedError
from flashmla_cupy.runtime import device, driver, inspect, launch, params, tensor_map
from tests.common import TOY

RECORD = inspect.Record(threads=128, cluster=2, smem_bytes=1024, params_bytes=144)
CLUSTER, PDL = 4, 6  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, ..._PROGRAMMATIC_STREAM_SERIALIZATION


def stub(monkeypatch, record=RECORD, result=0):
    """A kernel whose driver call records (grid, block, smem, stream, attributes, function, parameter bytes)."""
    kernel = launch.Kernel(TOY, record, module=None, function=SimpleNamespace(ptr=0x1234))
    calls = []

    def launch_stub(config, function, pointers, extra):
        assert extra == 0
        block = ctypes.c_void_p.from_address(pointers).value
        attributes = {int(a.id): a.value for a in config.attrs}
        assert config.numAttrs == len(attributes)
        calls.append(SimpleNamespace(
            grid=(config.gridDimX, config.gridDimY, config.gridDimZ), threads=config.blockDimX,
            smem_bytes=config.sharedMemBytes, stream=int(config.hStream), attributes=attributes, function=function,
            params=ctypes.string_at(block, record.params_bytes),
        ))  # fmt: skip
        return (result,)

    kernel._launch = launch_stub
    return kernel, calls


def test_launch_fills_the_configuration(monkeypatch):
    kernel, calls = stub(monkeypatch)
    record = params.new("CombineParams")
    record["batch"], record["lse"] = 77, 0xABC0
    kernel.launch((4, 2, 3), record, stream_ptr=9)
    kernel.launch((2, 1, 1), record, pdl=True, stream_ptr=10)
    plain, dependent = calls
    assert plain.grid == (4, 2, 3) and plain.threads == 128 and plain.smem_bytes == 1024 and plain.stream == 9
    assert plain.function == 0x1234 and plain.params == record.tobytes()
    assert set(plain.attributes) == {CLUSTER} and plain.attributes[CLUSTER].clusterDim.x == 2
    assert set(dependent.attributes) == {CLUSTER, PDL} and dependent.stream == 10
    assert dependent.attributes[PDL].programmaticStreamSerializationAllowed == 1


def test_no_attributes_without_cluster_and_pdl(monkeypatch):
    kernel, calls = stub(monkeypatch, inspect.Record(128, 1, 0, 144))
    kernel.launch((1, 1, 1), params.new("CombineParams"), stream_ptr=0)
    assert calls[0].attributes == {}


def test_disable_pdl(monkeypatch):
    monkeypatch.setenv("FLASHMLA_DISABLE_PDL", "1")
    kernel, calls = stub(monkeypatch)
    kernel.launch((2, 1, 1), params.new("CombineParams"), pdl=True, stream_ptr=0)
    assert set(calls[0].attributes) == {CLUSTER}


def test_threads_have_their_own_parameters(monkeypatch):
    kernel, calls = stub(monkeypatch)
    barrier = threading.Barrier(2)

    def work(value: int) -> None:
        record = params.new("CombineParams")
        record["batch"] = value
        for _ in range(200):
            barrier.wait()
            kernel.launch((value, 1, 1), record, stream_ptr=value)

    threads = [threading.Thread(target=work, args=(value,)) for value in (2, 4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    batch = params.STRUCTS["CombineParams"].fields["batch"][1]
    assert len(calls) == 400
    assert all(call.grid[0] == call.stream == call.params[batch] for call in calls)


def test_params_of_another_struct(monkeypatch):
    kernel, _ = stub(monkeypatch)
    with pytest.raises(ValueError):
        kernel.launch((1, 1, 1), params.new("SchedMetaParams"), stream_ptr=0)
    with pytest.raises(ValueError, match="record has 8 parameter bytes, params.py has 144"):
        launch.Kernel(TOY, inspect.Record(128, 1, 0, 8), None, SimpleNamespace(ptr=1))


def test_driver_errors_are_readable(monkeypatch):
    names = SimpleNamespace(
        cuGetErrorName=lambda code: (0, b"CUDA_ERROR_INVALID_VALUE"),
        cuGetErrorString=lambda code: (0, b"invalid argument"),
    )
    kernel, _ = stub(monkeypatch, result=1)
    monkeypatch.setattr(driver, "cu", lambda: names)
    with pytest.raises(FlashMLAError) as caught:
        kernel._state.configs = launch_configs = (SimpleNamespace(attrs=[], numAttrs=0), None)
        vars(launch_configs[0]).update(blockDimX=128, sharedMemBytes=0)
        kernel.launch((3, 1, 1), params.new("CombineParams"), stream_ptr=0)
    assert str(caught.value) == (
        "launch of toy.sm90.f32.n128, grid (3, 1, 1), 128 threads, cluster 2, 1024 bytes of shared memory: "
        "CUDA_ERROR_INVALID_VALUE (invalid argument)"
    )


GOOD = dict(ptr=0x1000, dtype_name="bfloat16", shape=(64, 100), strides_bytes=(128,), box=(64, 64))


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(ptr=0x1008), "ptr: got 0x1008"),
        (dict(dtype_name="int4"), "dtype_name: got 'int4'"),
        (dict(shape=()), "shape: got"),
        (dict(shape=(64, 0)), "shape: got"),
        (dict(strides_bytes=()), "strides_bytes: got"),
        (dict(strides_bytes=(120,)), "strides_bytes: got"),
        (dict(box=(64,)), "box: got"),
        (dict(box=(64, 257)), "box: got"),
        (dict(box=(4, 64)), "box: got .* multiple of 16 bytes"),
        (dict(box=(128, 64)), "box: got .* at most 128 bytes"),
        (dict(swizzle_bytes=48), "swizzle_bytes: got 48"),
        (dict(l2_promotion=32), "l2_promotion: got 32"),
    ],
)
def test_tensor_map_says_which_argument(change, message):
    with pytest.raises(ValueError, match=message):
        tensor_map.encode(**{**GOOD, **change})


def test_gpu_available_never_raises():
    assert device.gpu_available() in (True, False)


def test_errors_survive_pickling():
    import pickle

    for error in (KernelCompileError("message", "log"), UnsupportedError("what", ["why"], "how"), CaptureError("x")):
        again = pickle.loads(pickle.dumps(error))
        assert str(again) == str(error) and vars(again) == vars(error)
    assert str(UnsupportedError("dense_decode", ["h_q 3", "sm_75"], "use float16")) == (
        "dense_decode: h_q 3; sm_75 (use float16)"
    )
    assert issubclass(UnsupportedError, NotImplementedError)
