"""The public decode call: one function, and behind it the dense decode over a 16-bit cache or the sparse / FP8 one."""

from __future__ import annotations

from typing import Any

from . import _checks, dense_decode, sparse_decode
from ._checks import DecodeProblem


def flash_mla_with_kvcache(
    q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, head_dim_v: int, tile_scheduler_metadata: Any = None,
    num_splits: Any = None, causal: bool = False, is_fp8_kvcache: bool = False, indices: Any = None, *,
    softmax_scale: float | None = None, attn_sink: Any = None, topk_length: Any = None, extra_k_cache: Any = None,
    extra_indices: Any = None, extra_topk_length: Any = None, out: Any = None, lse: Any = None, workspace: Any = None,
) -> tuple[Any, Any]:
    """Attention of a few new query tokens over a latent KV cache: out = softmax(scale Q K^T) V, V = K[..., :512].

    Without indices every query attends to the tokens of its request (dense); with indices, to the tokens that they name
    (sparse).

    CuPy arrays run on q's device and CuPy's current stream there; nothing waits for the GPU, and the call can be
    captured into a CUDA graph after one call outside. Arrays of other libraries on a GPU are used in place (DLPack or
    __cuda_array_interface__) and the results are CuPy arrays. NumPy arrays run on the CPU and give NumPy arrays.
    On a GPU, indices go with an FP8 cache and a 16-bit cache without; the two other combinations need NumPy arrays.

    Args:
        q: (batch, s_q, h_q, d_qk) bfloat16 (ml_dtypes) or float16, d_qk 576 or 512. Any strides.
        k_cache: (pages, page_size, h_kv, d_qk) of q's type, h_kv dividing h_q. Dense: page_size 16, 32, 64, 128 or 256,
            or with block_table None (batch, s_k, h_kv, d_qk). Never copied: the address and all strides are multiples
            of 16 bytes, the last axis is contiguous.
        block_table: (batch, width) integers, the page of each page_size tokens of a request; None: contiguous cache.
            Not looked at with indices. A page within a request's length that the cache does not have: ValueError for
            NumPy arrays. On a GPU nothing looks at the values beforehand, and no memory outside the cache is touched:
            in a 16-bit cache such a page reads as zeros (the copy engine, TMA, fills what is out of bounds), in an FP8
            cache its tokens are no keys.
        cache_seqlens: (batch,) integers, tokens of each request; lengths beyond the cache are clipped. Not looked at
            with indices.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: what get_mla_metadata returned, or None for both to plan inside the call.
            Metadata of other lengths give the same results, only less evenly spread work. Not looked at where no
            request is split: one KV block each, or indices without topk_length that a plan by their shape leaves whole.
        causal: query i of s_q sees the first cache_seqlens - s_q + i + 1 tokens. False with indices.
        is_fp8_kvcache: the caches are FP8: uint8 (or int8, float8_e4m3fn) (pages, page_size, 1, bytes per token), 656
            bytes for d_qk 576 and 584 for d_qk 512 (flashmla_cupy.kv_format describes both), q bfloat16. Pages of any
            size, any distance apart. True must go with such a cache, and False with one of q's type.
        indices: (batch, s_q, topk) integers, or (batch, s_q, h_kv, topk) for a choice per KV head: token slots
            page * page_size + offset in the cache, of any order. Slots below 0 or beyond the cache are skipped and
            nothing is read for them. A slot that is named twice counts as two keys.
        softmax_scale: None is d_qk ** -0.5.
        attn_sink: (h_q,) float32, with indices only: a logit (natural log, not scaled) that takes part in the softmax
            of out without a value: out is multiplied by exp(lse) / (exp(lse) + exp(sink)). -inf has no effect, +inf
            gives zeros. lse stays without it.
        topk_length: (batch,) integers, with indices only: how many of the first indices of every query of a request
            count; negative is 0.
        extra_k_cache, extra_indices, extra_topk_length: a second cache of the same kind with its own page size, and
            its indices and lengths. Every query attends to both selections together.
        out, lse: arrays to write the results into, of any strides (out: last axis contiguous).
        workspace: one-dimensional contiguous uint8 or float32 memory of mla_workspace_bytes; None takes it from CuPy's
            pool (in a captured graph, from memory that the graph owns). out, lse and workspace that share memory with
            another argument are a ValueError.

    Returns:
        out (batch, s_q, h_q, 512) of q's type, and lse (batch, h_q, s_q) float32: the natural log-sum-exp of the scaled
        scores. A query that sees no token gives zeros and -inf.

    Raises:
        TypeError, ValueError: "argument: got ..., expected ...", before anything is launched. UnsupportedError: no
        kernel for the device or the arguments. CaptureError: the first call of its kind inside a graph capture.
    """
    if (indices is not None or is_fp8_kvcache is not False or attn_sink is not None or topk_length is not None
            or extra_k_cache is not None or extra_indices is not None or extra_topk_length is not None):
        arguments = dict(
            q=q, k_cache=k_cache, block_table=block_table, cache_seqlens=cache_seqlens, head_dim_v=head_dim_v,
            tile_scheduler_metadata=tile_scheduler_metadata, num_splits=num_splits, causal=causal,
            is_fp8_kvcache=is_fp8_kvcache, indices=indices, softmax_scale=softmax_scale, attn_sink=attn_sink,
            topk_length=topk_length, extra_k_cache=extra_k_cache, extra_indices=extra_indices,
            extra_topk_length=extra_topk_length, out=out, lse=lse, workspace=workspace)
        if sparse_decode.serves(arguments):
            return sparse_decode.decode(arguments)
    if causal is not True and causal is not False:  # 1.0 == True, so the plan's key alone would let it pass
        causal = _checks.check_bool("causal", causal)
    if softmax_scale is not None and type(softmax_scale) is not float:
        softmax_scale = _checks.check_scale("softmax_scale", softmax_scale, 0)
    if type(head_dim_v) is not int:
        head_dim_v = _checks.check_int("head_dim_v", head_dim_v, 0)
    return dense_decode.decode((head_dim_v, causal, softmax_scale),
                               (q, k_cache, block_table, cache_seqlens, tile_scheduler_metadata, num_splits, out, lse,
                                workspace))


def check(arguments: dict[str, Any]) -> DecodeProblem:
    """The problem that a call of flash_mla_with_kvcache poses; raises what the call would, without its results.

    arguments: those of the call by name, arrays of one backend, without tile_scheduler_metadata, num_splits, out, lse
    and workspace.
    """
    arguments = dict.fromkeys(("tile_scheduler_metadata", "num_splits", "out", "lse", "workspace")) | arguments
    if sparse_decode.serves(arguments):
        return sparse_decode.prepare(arguments)[0]
    named = {name: arguments[name] for name in ("q", "k_cache", "block_table", "cache_seqlens", "head_dim_v",
                                                "num_splits", "causal", "softmax_scale", "out", "lse")}
    return _checks.check_decode(metadata=None, **named)
