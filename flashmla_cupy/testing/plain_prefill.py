"""Sparse prefill by its definition, one query row and one index at a time: an independent check of the NumPy backend.

Shares nothing with reference/ on purpose. Small cases only.
"""

from __future__ import annotations

import math

import numpy as np


def attend(
    q: np.ndarray,
    kv: np.ndarray,
    indices: np.ndarray,
    sm_scale: float,
    d_v: int,
    *,
    topk_length: np.ndarray | None = None,
    attn_sink: np.ndarray | None = None,
    cu_seqlens_q: np.ndarray | None = None,
    cu_seqlens_kv: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """q (s_q, h_q, d), kv (s_kv, 1, d) -> out (s_q, h_q, d_v), max_logits, lse (s_q, h_q), all float64."""
    s_q, h_q, _ = q.shape
    out = np.zeros((s_q, h_q, d_v))
    max_logits, lse = np.full((s_q, h_q), -math.inf), np.full((s_q, h_q), -math.inf)
    for token in range(s_q):
        row = indices[token].reshape(-1).tolist()
        count = len(row) if topk_length is None else max(0, int(topk_length[token]))
        begin, end = _keys_of(token, len(kv), cu_seqlens_q, cu_seqlens_kv)
        keys = [kv[begin + index, 0].astype(np.float64) for index in row[:count] if 0 <= index < end - begin]
        if not keys:
            continue
        keys = np.array(keys)
        for head in range(h_q):
            scores = keys @ q[token, head].astype(np.float64) * sm_scale
            peak = scores.max()
            weights = np.exp(scores - peak)
            total = peak + math.log(weights.sum())
            share = 1.0
            if attn_sink is not None:
                sink = float(attn_sink[head])
                share = 0.0 if sink - total > 700 else 1 / (1 + math.exp(sink - total))
            out[token, head] = weights @ keys[:, :d_v] / weights.sum() * share
            max_logits[token, head], lse[token, head] = peak, total
    return out, max_logits, lse


def _keys_of(token: int, s_kv: int, cu_q: np.ndarray | None, cu_kv: np.ndarray | None) -> tuple[int, int]:
    """The rows of kv of the token's request, from and to; none for a token of no request."""
    if cu_q is None:
        return 0, s_kv
    for request in range(len(cu_q) - 1):
        if cu_q[request] <= token < cu_q[request + 1]:
            return int(cu_kv[request]), int(cu_kv[request + 1])
    return 0, 0
