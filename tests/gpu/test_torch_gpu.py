"""flashmla_cupy.torch on a GPU: torch's streams, allocator and graphs."""

from __future__ import annotations

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from flashmla_cupy.errors import UnsupportedError  # noqa: E402
from flashmla_cupy.runtime import device as runtime_device  # noqa: E402
from flashmla_cupy.torch import (  # noqa: E402
    FlashMLASchedMeta,
    flash_mla_sparse_fwd,
    flash_mla_with_kvcache,
    get_mla_metadata,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(autouse=True)
def only_on_hopper():
    if not torch.cuda.is_available():
        pytest.skip("torch without CUDA")
    if runtime_device.info().compute_capability[0] != 9:
        pytest.skip("dense decode needs compute capability 9.x")


def small(dtype=torch.bfloat16, lengths=(300, 0, 64, 4000), s_q=2, h_q=64, d_qk=576):
    generator = torch.Generator("cuda").manual_seed(1)
    batch, width = len(lengths), -(-max(lengths) // 64)
    q = torch.randn(batch, s_q, h_q, d_qk, generator=generator, device="cuda").to(dtype)
    k_cache = torch.randn(batch * width, 64, 1, d_qk, generator=generator, device="cuda").to(dtype)
    table = torch.randperm(batch * width, generator=generator, device="cuda").to(torch.int32).view(batch, width)
    return q, k_cache, table, torch.tensor(lengths, dtype=torch.int32, device="cuda")


def check(result, q, k_cache, table, lengths, causal=False):
    """Against float64 in torch."""
    out, lse = result
    assert out.is_cuda and out.dtype == q.dtype and lse.dtype == torch.float32
    for i, length in enumerate(lengths.tolist()):
        if length == 0:
            assert not out[i].any() and torch.isposinf(lse[i]).all()
            continue
        keys = k_cache[table[i].long()].reshape(-1, q.shape[3])[:length].double()
        scores = torch.einsum("shd,kd->hsk", q[i].double(), keys) * q.shape[3] ** -0.5
        if causal:
            first = length - q.shape[1] + 1
            visible = torch.arange(first, length + 1, device="cuda")[:, None]
            scores = scores.masked_fill(torch.arange(length, device="cuda") >= visible, float("-inf"))
        expected_lse = scores.logsumexp(-1)
        expected = torch.einsum("hsk,kd->shd", scores.softmax(-1).nan_to_num(0.0), keys[:, :512])
        torch.testing.assert_close(out[i].double(), expected, rtol=0.02, atol=0.02)
        expected_lse = torch.where(expected_lse == float("-inf"), float("inf"), expected_lse)
        torch.testing.assert_close(lse[i].double(), expected_lse, rtol=2e-5, atol=5e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
def test_both_forms_of_metadata(dtype, causal):
    arrays = small(dtype)
    metadata, num_splits = get_mla_metadata(arrays[3], 128, 1)
    assert metadata.is_cuda and metadata.dtype == num_splits.dtype == torch.int32 and num_splits.shape == (5,)
    first = flash_mla_with_kvcache(*arrays, 512, metadata, num_splits, None, causal)
    check(first, *arrays, causal)
    sched, nothing = get_mla_metadata()
    for _ in range(2):
        second = flash_mla_with_kvcache(*arrays, 512, sched, nothing, causal=causal)
        assert torch.equal(first[0], second[0]) and torch.equal(first[1], second[1])
    assert isinstance(sched, FlashMLASchedMeta) and torch.equal(sched.tile_scheduler_metadata, metadata)
    third = flash_mla_with_kvcache(*arrays, 512, None, None, causal=causal)
    assert torch.equal(first[0], third[0])


def test_torchs_current_stream_and_allocator_are_used():
    arrays = small()
    expected = flash_mla_with_kvcache(*arrays, 512, None)
    lengths = torch.zeros_like(arrays[3])
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        lengths.copy_(arrays[3])
        metadata = get_mla_metadata(lengths, 128, 1)
        result = flash_mla_with_kvcache(*arrays[:3], lengths, 512, *metadata)
    stream.synchronize()
    assert torch.equal(result[0], expected[0])
    import cupy

    before = cupy.get_default_memory_pool().total_bytes()
    flash_mla_with_kvcache(*arrays[:3], lengths, 512, None)
    assert cupy.get_default_memory_pool().total_bytes() == before


@pytest.mark.parametrize("form", ["tensors", "inside", "sched"])
def test_torch_graph_follows_lengths_written_in_place(form):
    arrays = small(lengths=(4000,) * 4)
    lengths = torch.zeros_like(arrays[3])
    sched = FlashMLASchedMeta()

    def body():
        plan = get_mla_metadata(lengths, 128, 1) if form == "tensors" else (sched if form == "sched" else None, None)
        return flash_mla_with_kvcache(*arrays[:3], lengths, 512, *plan)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        body()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = body()
    for now in ((4000,) * 4, (1, 0, 64, 65), (0,) * 4):
        lengths.copy_(torch.tensor(now, dtype=torch.int32))
        noise = torch.full((64 << 20,), 255, dtype=torch.uint8, device="cuda")
        graph.replay()
        check(result, *arrays[:3], lengths)
        assert bool((noise == 255).all())


def test_views_and_other_integers():
    q, k_cache, table, lengths = small()
    expected, _ = flash_mla_with_kvcache(q, k_cache, table, lengths, 512, None)
    wide = torch.zeros(4, 2, 128, 576, dtype=q.dtype, device="cuda")
    wide[:, :, 8:72] = q
    out, _ = flash_mla_with_kvcache(wide[:, :, 8:72], k_cache, table.long(), lengths.long(), 512, None)
    assert torch.equal(out, expected)
    out, _ = flash_mla_with_kvcache(q.requires_grad_(), k_cache, table.cpu(), lengths.cpu(), 512, None)
    assert torch.equal(out, expected) and not out.requires_grad


def test_wrong_places_and_arguments():
    q, k_cache, table, lengths = small()
    with pytest.raises(TypeError, match="^k_cache: got "):
        flash_mla_with_kvcache(q, k_cache.cpu(), table, lengths, 512, None)
    with pytest.raises(TypeError, match="^k_cache: got "):
        flash_mla_with_kvcache(q.cpu(), k_cache, table, lengths, 512, None)
    slots = torch.zeros(4, 2, 64, dtype=torch.int32, device="cuda")
    with pytest.raises(UnsupportedError, match="^indices without is_fp8_kvcache: not supported"):
        flash_mla_with_kvcache(q, k_cache, table, lengths, 512, None, indices=slots)
    with pytest.raises(TypeError, match="^q: got dtype float32"):
        flash_mla_with_kvcache(q.float(), k_cache.float(), table, lengths, 512, None)


@pytest.mark.skipif(not torch.cuda.is_available() or torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_second_device():
    arrays = small()
    expected = flash_mla_with_kvcache(*arrays, 512, None)
    moved = [a.to("cuda:1") for a in arrays]
    torch.cuda.synchronize(0), torch.cuda.synchronize(1)
    out, lse = flash_mla_with_kvcache(*moved, 512, *get_mla_metadata(moved[3], 128, 1))
    assert out.device.index == lse.device.index == 1 and torch.cuda.current_device() == 0
    assert np.array_equal(out.cpu().view(torch.int16).numpy(), expected[0].cpu().view(torch.int16).numpy())


def test_sparse_prefill():
    """Against float64 in torch; a token without an index gives zeros and +inf."""
    generator = torch.Generator("cuda").manual_seed(2)
    shapes = (150, 70, 576), (900, 1, 576)
    q, kv = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for shape in shapes)
    indices = torch.randint(0, 900, (150, 1, 200), generator=generator, device="cuda", dtype=torch.int32)
    indices[7] = -1
    out, max_logits, lse = flash_mla_sparse_fwd(q, kv, indices, 576**-0.5)
    assert out.dtype == torch.bfloat16 and not out[7].any() and torch.isposinf(lse[7]).all()
    keys = kv[indices[:, 0].clamp(min=0).long(), 0].double()
    scores = torch.einsum("shd,skd->shk", q.double(), keys) * 576**-0.5
    expected = torch.einsum("shk,skd->shd", scores.softmax(-1), keys[..., :512])
    rows = [i for i in range(150) if i != 7]
    torch.testing.assert_close(out[rows].double(), expected[rows], rtol=0.02, atol=0.02)
    torch.testing.assert_close(lse[rows].double(), scores.logsumexp(-1)[rows], rtol=2e-5, atol=5e-5)
    torch.testing.assert_close(max_logits[rows].double(), scores.amax(-1)[rows], rtol=2e-5, atol=5e-5)
