"""Arrays of a sparse prefill case, built hostile: every row of kv that no counting index names, and everything around
kv, is poison; outputs are pre-filled with NaN inside guard bands. Written over the array namespace.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from flashmla_cupy.testing import inputs
from flashmla_cupy.testing.cases import HEAD_DIM_V
from flashmla_cupy.testing.inputs import Guarded
from flashmla_cupy.testing.prefill_cases import PrefillCase
from flashmla_cupy.testing.sparse_cases import INT_MIN, INVALID_VALUES, invalid_value
from flashmla_cupy.testing.sparse_inputs import sinks

_POISON_BITS = {"nan": 0x7FC0, "inf": 0x7F80, "zero": 0}  # bfloat16
_PAD = 8  # elements: keeps the rows of padded layouts on 16-byte boundaries


@dataclass
class PrefillInputs:
    """What one call is given; the optional arguments are None where the case has none."""

    q: Any  # (s_q, h_q, d_qk) bfloat16
    kv: Any  # (s_kv, 1, d_qk) bfloat16
    indices: Any  # (s_q, 1, topk) int32
    topk_length: Any  # (s_q,) int32 | None
    attn_sink: Any  # (h_q,) float32 | None
    cu_seqlens_q: Any  # (requests + 1,) int32 | None
    cu_seqlens_kv: Any
    out: Guarded  # (s_q, h_q, 512) bfloat16
    max_logits: Guarded  # (s_q, h_q) float32
    lse: Guarded

    @property
    def outputs(self) -> dict[str, Guarded]:
        return {"out": self.out, "max_logits": self.max_logits, "lse": self.lse}

    def keywords(self) -> dict[str, Any]:
        """The optional arguments that the call and the reference share, by name."""
        return {name: getattr(self, name) for name in ("topk_length", "attn_sink", "cu_seqlens_q", "cu_seqlens_kv")}


def build(case: PrefillCase, xp: Any = np) -> PrefillInputs:
    """The arrays of `case`, the same bits for every `xp`."""
    rng = np.random.default_rng(case.seed)
    cu_q, cu_kv = offsets(case, rng)
    first, count = _ranges(case, cu_q, cu_kv)
    indices = _indices(case, rng, count)
    lengths = _lengths(case, rng)
    counts = (indices >= 0) & (indices < count[:, None])
    if lengths is not None:
        counts &= np.arange(case.topk) < lengths[:, None]
    named = np.zeros(case.s_kv, bool)
    named[(indices + first[:, None])[counts]] = True
    sink = sinks(case, xp)
    small = {"topk_length": lengths, "cu_seqlens_q": cu_q, "cu_seqlens_kv": cu_kv}
    return PrefillInputs(
        _query(case, xp), _kv(case, xp, named), xp.asarray(indices[:, None].astype(np.int32)), attn_sink=sink,
        **{name: None if x is None else xp.asarray(x) for name, x in small.items()}, **outputs(case, xp),
    )


def outputs(case: PrefillCase, xp: Any) -> dict[str, Guarded]:
    """out, max_logits and lse by name."""
    rows = {name: _guarded_rows(xp, case.out_layout, case.s_q, case.h_q) for name in ("max_logits", "lse")}
    return {"out": _guarded(xp, case.out_layout, case.s_q, case.h_q, HEAD_DIM_V), **rows}


def _query(case: PrefillCase, xp: Any) -> Any:
    bits = inputs.random_bits(xp, "bfloat16", (case.s_q, case.h_q, case.d_qk), 2 * case.seed, case.q_gain)
    q = _guarded(xp, case.q_layout, *bits.shape)
    q.select(q.buffer)[...] = bits
    return q.array


def _kv(case: PrefillCase, xp: Any, named: np.ndarray) -> Any:
    """(s_kv, 1, d_qk), random where `named` (s_kv,), else poison, also around it."""
    rows, d = case.s_kv, case.d_qk
    shape, select = {
        "dense": ((rows, 1, d), lambda x: x),
        "interleaved": ((rows, 2, d), lambda x: x[:, 1:]),  # keys of two layers take turns
        "offset": ((rows + 3, 1, d), lambda x: x[2:-1]),
        "padded": ((rows, 1, d + _PAD), lambda x: x[..., :d]),
        "unaligned": ((rows, 1, d + 3), lambda x: x[..., 1 : d + 1]),
        "reversed": ((rows, 1, d), lambda x: x[::-1]),
    }[case.kv_layout]
    poison = np.uint16(_POISON_BITS[case.poison])
    buffer = xp.full(shape, poison, np.uint16)
    view = select(buffer)
    bits = inputs.random_bits(xp, "bfloat16", (rows, 1, d), 2 * case.seed + 1)
    view[...] = xp.where(xp.asarray(named)[:, None, None], bits, poison)
    return view.view(inputs.DTYPES["bfloat16"])


def offsets(case: PrefillCase, rng: np.random.Generator) -> tuple[np.ndarray | None, np.ndarray | None]:
    """cu_seqlens_q and cu_seqlens_kv, int32."""
    if case.requests == "none":
        return None, None
    requests = {"one": 1, "some": 4, "empty": 9, "gaps": 3}[case.requests]
    cu_q, cu_kv = (np.sort(rng.integers(0, total + 1, requests + 1)) for total in (case.s_q, case.s_kv))
    if case.requests == "empty":  # every third request has no tokens, every third no keys
        cu_q[1::3], cu_kv[2::3] = cu_q[0:-1:3], cu_kv[1:-1:3]
    if case.requests != "gaps":
        cu_q[0], cu_q[-1] = 0, case.s_q
    return cu_q.astype(np.int32), cu_kv.astype(np.int32)


def _ranges(case: PrefillCase, cu_q: Any, cu_kv: Any) -> tuple[np.ndarray, np.ndarray]:
    """First row of kv and number of rows for each query token, request by request."""
    if cu_q is None:
        return np.zeros(case.s_q, np.int64), np.full(case.s_q, case.s_kv)
    first, count = np.zeros(case.s_q, np.int64), np.zeros(case.s_q, np.int64)
    for request in range(len(cu_q) - 1):
        tokens = slice(cu_q[request], cu_q[request + 1])
        first[tokens], count[tokens] = cu_kv[request], cu_kv[request + 1] - cu_kv[request]
    return first, count


def _indices(case: PrefillCase, rng: np.random.Generator, count: np.ndarray) -> np.ndarray:
    """int64 (s_q, topk). With invalid ones among them, row 0 and the last row of each token are named by none."""
    shape, count = (case.s_q, case.topk), count[:, None]
    inner = (count > 2) & (case.invalid != "none")
    low, high = np.where(inner, 1, 0), np.where(inner, count - 1, count)
    drawn = rng.random(shape)
    if case.few_rows:
        drawn = rng.random((case.s_q, 5))[np.arange(case.s_q)[:, None], rng.integers(0, 5, shape)]
    indices = low + (drawn * np.maximum(high - low, 0)).astype(np.int64)  # 0 where a token has no rows: invalid
    wrong = np.stack([invalid_value(name, 0) + count * name.startswith("capacity") for name in INVALID_VALUES])[..., 0]
    choice = rng.integers(0, len(INVALID_VALUES), shape)
    if case.invalid_value is not None:
        choice = np.full(shape, INVALID_VALUES.index(case.invalid_value))
    wrong = wrong[choice, np.arange(case.s_q)[:, None]]
    place = np.arange(case.topk)
    at = {
        "none": lambda: np.zeros(shape, bool),
        "random": lambda: rng.random(shape) < 0.3,
        "runs": lambda: rng.random((case.s_q, case.topk // 24 + 1)).repeat(24, axis=1)[:, : case.topk] < 0.5,
        "head": lambda: np.broadcast_to(place < case.topk // 2, shape),
        "tail": lambda: place >= rng.integers(0, case.topk + 1, (case.s_q, 1)),
        "all": lambda: np.ones(shape, bool),
    }[case.invalid]()
    return np.where(at, wrong, indices)


def _lengths(case: PrefillCase, rng: np.random.Generator) -> np.ndarray | None:
    topk, s_q = case.topk, case.s_q
    if case.length == "none":
        return None
    lengths = {
        "zero": lambda: np.zeros(s_q),
        "one": lambda: np.ones(s_q),
        "random": lambda: rng.choice([0, 1, 63, 64, 65, topk // 2, topk, *rng.integers(0, topk + 1, 5)], s_q),
        "negative": lambda: rng.choice([-1, -64, INT_MIN, 0, topk, (topk + 1) // 2], s_q),
        "beyond": lambda: topk + rng.choice([0, 1, 64, 1 << 20], s_q),
    }[case.length]()
    return lengths.astype(np.int32)


def _guarded(xp: Any, layout: str, s: int, h: int, d: int) -> Guarded:
    """bfloat16 (s, h, d)"""
    shape, select = {
        "dense": ((s, h, d), lambda x: x),
        "head_view": ((s, max(64, h) + _PAD, d), lambda x: x[:, 4 : 4 + h]),
        "padded": ((s + 1, h, d + _PAD), lambda x: x[1:, :, :d]),
        "swapped": ((h, s, d), lambda x: x.transpose(1, 0, 2)),
    }[layout]
    guarded = Guarded(xp.empty(shape, np.uint16), select, inputs.DTYPES["bfloat16"])
    guarded.refill()
    return guarded


def _guarded_rows(xp: Any, layout: str, s: int, h: int) -> Guarded:
    """float32 (s, h)"""
    shape, select = {
        "dense": ((s, h), lambda x: x),
        "head_view": ((s, h + 5), lambda x: x[:, 2 : 2 + h]),
        "padded": ((s + 3, h), lambda x: x[1 : 1 + s]),
        "swapped": ((h, s), lambda x: x.transpose(1, 0)),
    }[layout]
    guarded = Guarded(xp.empty(shape, np.uint32), select, inputs.DTYPES["float32"])
    guarded.refill()
    return guarded
