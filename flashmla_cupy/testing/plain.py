"""Attention by its definition, one query row at a time: an independent check of the NumPy backend.

Shares nothing with reference/ on purpose (no blocking, no vectorised gather, no array namespace). Small cases only.
"""

from __future__ import annotations

import math

import numpy as np


def attend(
    q: np.ndarray,
    k_cache: np.ndarray,
    block_table: np.ndarray | None,
    lengths: tuple[int, ...],
    d_v: int,
    softmax_scale: float,
    causal: bool,
) -> tuple[np.ndarray, np.ndarray]:
    """q (b, s_q, h_q, d), k_cache (pages, page, h_kv, d) -> out (b, s_q, h_q, d_v), lse (b, h_q, s_q), both float64."""
    batch, s_q, h_q, _ = q.shape
    group = h_q // k_cache.shape[2]
    out, lse = np.zeros((batch, s_q, h_q, d_v)), np.full((batch, h_q, s_q), -math.inf)
    for request in range(batch):
        tokens = _tokens(k_cache, block_table, request, lengths[request])
        for query in range(s_q):
            visible = max(0, lengths[request] - s_q + query + 1) if causal else lengths[request]
            for head in range(h_q):
                keys = tokens[:visible, head // group]
                if not visible:
                    continue
                scores = keys @ q[request, query, head].astype(np.float64) * softmax_scale
                peak = scores.max()
                weights = np.exp(scores - peak)
                out[request, query, head] = weights @ keys[:, :d_v] / weights.sum()
                lse[request, head, query] = peak + math.log(weights.sum())
    return out, lse


def _tokens(k_cache: np.ndarray, block_table: np.ndarray | None, request: int, length: int) -> np.ndarray:
    """The request's own keys (length, h_kv, d) in float64."""
    if block_table is None:
        return k_cache[request, :length].astype(np.float64)
    page = k_cache.shape[1]
    pieces = [k_cache[block_table[request, index // page], index % page] for index in range(length)]
    return np.array(pieces, dtype=np.float64).reshape(length, *k_cache.shape[2:])
