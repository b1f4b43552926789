"""Sparse attention by its definition, one query row and one index at a time: an independent check of the NumPy backend.

Shares nothing with reference/ on purpose: bytes are read where docs/kernels/kv_quant.md says they lie and decoded by
the formats' definitions. Small cases only.
"""

from __future__ import annotations

import math
import struct

import numpy as np

E4M3 = [
    math.nan if code & 0x7F == 0x7F
    else (-1.0 if code & 0x80 else 1.0) * (
        (code & 7) / 8 * 2.0**-6 if code >> 3 & 15 == 0 else (1 + (code & 7) / 8) * 2.0 ** ((code >> 3 & 15) - 7)
    )
    for code in range(256)
]


def token(cache: np.ndarray, slot: int, d_qk: int) -> np.ndarray:
    """The key float64 (d_qk,) at a slot of an FP8 cache (pages, page_size, 1, bytes_per_token) uint8."""
    page_size, token_bytes = cache.shape[1], cache.shape[3]
    page = cache[slot // page_size].reshape(-1).tobytes()  # one run of bytes
    place = slot % page_size
    if d_qk == 576:
        row = page[place * token_bytes : (place + 1) * token_bytes]
        codes, rope = row[:512], row[528:656]
        scales, tile = struct.unpack("<4f", row[512:528]), 128
    else:
        row = page[place * 576 : (place + 1) * 576]
        codes, rope = row[:448], row[448:576]
        at = page_size * 576 + place * 8
        scales, tile = [math.nan if byte == 255 else 2.0 ** (byte - 127) for byte in page[at : at + 7]], 64
    values = [E4M3[code] * scales[i // tile] for i, code in enumerate(codes)]
    values += struct.unpack(f"<{len(rope) // 2}f", b"".join(b"\0\0" + rope[i : i + 2] for i in range(0, len(rope), 2)))
    return np.array(values)


def keys_of_requests(
    cache: np.ndarray, block_table: np.ndarray | None, lengths: tuple[int, ...], d_qk: int
) -> np.ndarray:
    """The tokens of each request as a contiguous cache for plain.attend: float64 (batch, longest, 1, d_qk)."""
    page_size = cache.shape[1]
    keys = np.full((len(lengths), max(lengths, default=0), 1, d_qk), math.nan)
    for request, length in enumerate(lengths):
        for index in range(length):
            page = request if block_table is None else int(block_table[request, index // page_size])
            keys[request, index, 0] = token(cache, page * page_size + index % page_size, d_qk)
    return keys


def attend(
    q: np.ndarray,
    k_cache: np.ndarray,
    indices: np.ndarray,
    d_v: int,
    softmax_scale: float,
    *,
    topk_length: np.ndarray | None = None,
    attn_sink: np.ndarray | None = None,
    extra_k_cache: np.ndarray | None = None,
    extra_indices: np.ndarray | None = None,
    extra_topk_length: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """q (b, s_q, h_q, d), indices (b, s_q, topk) -> out (b, s_q, h_q, d_v), lse (b, h_q, s_q), both float64."""
    batch, s_q, h_q, d_qk = q.shape
    out, lse = np.zeros((batch, s_q, h_q, d_v)), np.full((batch, h_q, s_q), -math.inf)
    caches = [(k_cache, indices, topk_length, {})]
    if extra_k_cache is not None:
        caches.append((extra_k_cache, extra_indices, extra_topk_length, {}))
    for request in range(batch):
        for query in range(s_q):
            keys = []
            for cache, chosen, lengths, known in caches:
                row = chosen[request, query].tolist()
                count = len(row) if lengths is None else max(0, int(lengths[request]))
                for slot in row[:count]:
                    if 0 <= slot < cache.shape[0] * cache.shape[1]:
                        if slot not in known:
                            known[slot] = token(cache, slot, d_qk)
                        keys.append(known[slot])
            if not keys:
                continue
            keys = np.array(keys)
            for head in range(h_q):
                scores = keys @ q[request, query, head].astype(np.float64) * softmax_scale
                peak = scores.max()
                weights = np.exp(scores - peak)
                total = peak + math.log(weights.sum())
                share = 1.0
                if attn_sink is not None:
                    sink = float(attn_sink[head])
                    share = 0.0 if sink - total > 700 else 1 / (1 + math.exp(sink - total))
                out[request, query, head] = weights @ keys[:, :d_v] / weights.sum() * share
                lse[request, head, query] = total
    return out, lse
