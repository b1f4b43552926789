"""Sparse prefill cases: what one call looks like, and the three suites (pure data, no array library).

As in cases.py the data follow from `seed` alone, and every row of kv that no counting index names is poison.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

from flashmla_cupy.testing.cases import POISONS, Q_LAYOUTS, YARN_SCALE, _Deck, _numbered, name_of, pick
from flashmla_cupy.testing.sparse_cases import INVALID, INVALID_VALUES, LENGTHS, SINKS

HEADS = (1, 3, 8, 16, 24, 63, 64, 65, 96, 126, 128, 192)
WIDTHS = (1, 6, 63, 64, 65, 100, 128, 133, 192, 256, 512, 576, 1024, 2048, 2176)  # of index lists
TOKENS = (1, 2, 5, 64, 131, 132, 133, 700)  # query tokens
ROWS = (1, 5, 63, 64, 700, 4096, 60000)  # of kv; the last is larger than the L2
KV_LAYOUTS = ("dense", "interleaved", "offset", "padded", "unaligned", "reversed")
REQUESTS = ("none", "one", "some", "empty", "gaps")  # cu_seqlens


@dataclass(frozen=True)
class PrefillCase:
    """One sparse prefill call.

    topk: indices of a query token. s_kv: rows of kv.
    invalid, invalid_value: where and what the indices are that name no row (None: a mixture of all INVALID_VALUES, of
    which "capacity" is the number of rows that the token may name).
    length: the kind of topk_length. few_rows: indices are drawn from five rows only, so most are named many times.
    requests: the kind of cu_seqlens: requests of any length, also "empty" ones, or with tokens of no request ("gaps").
    """

    s_q: int
    topk: int
    h_q: int = 64
    s_kv: int = 300
    d_qk: int = 576
    invalid: str = "none"
    invalid_value: str | None = None
    length: str = "none"
    few_rows: bool = False
    requests: str = "none"
    sink: str = "none"
    softmax_scale: float | None = None
    q_gain: float = 1.0
    q_layout: str = "dense"
    kv_layout: str = "dense"
    out_layout: str = "dense"
    poison: str = "nan"
    unchanged: bool = False  # also require the same bits under every other poison, invalid value and layout of kv
    seed: int = 0

    @property
    def scale(self) -> float:
        return self.d_qk**-0.5 if self.softmax_scale is None else self.softmax_scale

    @property
    def keys(self) -> int:
        """Indices of all query tokens: what the reference's time and memory follow."""
        return self.s_q * self.topk

    @property
    def scores(self) -> int:
        return self.keys * self.h_q

    @property
    def name(self) -> str:
        """Short and unique within a suite; readable in a failure line."""
        parts = [f"sq={self.s_q}", f"h={self.h_q}", f"topk={self.topk}", f"skv={self.s_kv}", f"d={self.d_qk}"]
        if self.few_rows:
            parts.append("duplicates")
        return name_of(
            self, parts, invalid="invalid", value="invalid_value", length="length", requests="requests", sink="sink",
            kv="kv_layout", q="q_layout", out="out_layout",
        )

    def variants(self) -> list[PrefillCase]:
        """The same keys with every other content of what must not matter (used when `unchanged`)."""
        others = [replace(self, poison=poison) for poison in POISONS if poison != self.poison]
        others += [replace(self, kv_layout=kind) for kind in KV_LAYOUTS if kind != self.kv_layout]
        if self.invalid != "none":
            others += [replace(self, invalid_value=value) for value in INVALID_VALUES if value != self.invalid_value]
        return others


@cache
def smoke() -> tuple[PrefillCase, ...]:
    """Small calls that touch every kind once; seconds on a GPU and on the NumPy backend."""
    rows = [
        PrefillCase(1, 64),
        PrefillCase(1, 1, h_q=128),
        PrefillCase(3, 133, h_q=16),
        PrefillCase(2, 200, h_q=128),
        PrefillCase(3, 100, h_q=16, invalid="random", unchanged=True),
        PrefillCase(2, 128, h_q=16, d_qk=512, invalid="runs", unchanged=True),
        PrefillCase(4, 70, h_q=16, invalid="all"),
        PrefillCase(5, 192, h_q=8, length="random"),
        PrefillCase(3, 64, h_q=16, length="negative", d_qk=512),
        PrefillCase(2, 100, h_q=63, sink="mixed", invalid="head"),
        PrefillCase(2, 300, h_q=8, s_kv=5),
        PrefillCase(6, 90, h_q=8, requests="some", invalid="random"),
        PrefillCase(9, 70, h_q=3, requests="empty", length="random", sink="mixed", d_qk=512),
        PrefillCase(7, 64, h_q=16, requests="gaps", invalid="tail"),
        PrefillCase(3, 64, h_q=16, few_rows=True, kv_layout="interleaved"),
        PrefillCase(5, 64, h_q=3, q_layout="head_view", out_layout="head_view", kv_layout="offset"),
        PrefillCase(4, 6, h_q=1, q_layout="padded", out_layout="swapped", kv_layout="reversed"),
        PrefillCase(2, 65, h_q=5, q_layout="swapped", out_layout="padded", kv_layout="unaligned"),
        PrefillCase(1, 576, h_q=192, softmax_scale=0.1, invalid="tail"),
        PrefillCase(150, 20, h_q=2, length="random"),
        PrefillCase(5, 300, h_q=16, s_kv=60000, length="random", invalid="random", unchanged=True),
        PrefillCase(5, 300, h_q=70, s_kv=60000, d_qk=512, requests="some"),
    ]
    return _numbered(rows)


@cache
def corner() -> tuple[PrefillCase, ...]:
    """The kinds of input that broke other libraries: invalid indices, widths, empty rows, strides, sinks, requests."""
    rows = []
    for d_qk in (576, 512):
        # Nothing to attend to: no length, no valid index, no rows.
        rows += [PrefillCase(s_q, 64, h_q=h, d_qk=d_qk, length=length) for s_q in (1, 5, 300) for h in (16, 128)
                 for length in ("zero", "negative", "one", "beyond")]
        rows += [PrefillCase(3, topk, d_qk=d_qk, invalid="all", sink=sink) for topk in (1, 64, 200)
                 for sink in ("none", "mixed")]
        rows += [PrefillCase(3, 64, d_qk=d_qk, s_kv=0, invalid="all", sink=sink) for sink in ("none", "mixed")]
        # Invalid indices while row 0, the last row and all rows that nobody names are NaN.
        rows += [PrefillCase(5, 130, h_q=h, d_qk=d_qk, invalid=invalid, invalid_value=value, unchanged=True)
                 for invalid in ("random", "runs", "head", "tail") for value in ("-1", None) for h in (16, 128)]
        rows += [PrefillCase(3, 64, h_q=16, d_qk=d_qk, invalid="random", invalid_value=value)
                 for value in INVALID_VALUES]
        # Any width, more indices than rows, few query tokens and more than there are SMs.
        rows += [PrefillCase(3, topk, h_q=h, d_qk=d_qk, s_kv=s_kv) for topk in WIDTHS for h in (16, 128)
                 for s_kv in (5, 4096)]
        rows += [PrefillCase(s_q, 70, h_q=h, d_qk=d_qk) for s_q in TOKENS for h in (16, 128)]
        rows += [PrefillCase(s_q, 200, h_q=h, d_qk=d_qk, s_kv=60000, length=length, invalid="random", kv_layout=kind)
                 for s_q in (1, 200) for h in (16, 128) for length in ("none", "random")
                 for kind in ("dense", "interleaved")]
        # Sinks, requests.
        rows += [PrefillCase(5, topk, h_q=h, d_qk=d_qk, sink=sink, invalid=invalid) for topk in (64, 512)
                 for h in (16, 128) for sink in SINKS[1:] for invalid in ("none", "head")]
        rows += [PrefillCase(s_q, 133, h_q=h, d_qk=d_qk, requests=kind, length=length, invalid="random")
                 for s_q in (1, 20, 300) for h in (16, 70) for kind in REQUESTS[1:] for length in ("none", "random")]
    # Head counts.
    rows += [PrefillCase(4, 70, h_q=h, length="random") for h in (*HEADS, 129, 256, 513)]
    # Views of larger buffers.
    rows += [PrefillCase(5, 100, h_q=8, q_layout=q, out_layout=out, kv_layout=kind)
             for q, out in zip(Q_LAYOUTS, Q_LAYOUTS[1:] + Q_LAYOUTS[:1], strict=True) for kind in KV_LAYOUTS]
    # Softmax scales, one-hot rows, rows named many times.
    rows += [PrefillCase(3, 333, h_q=h, softmax_scale=scale) for scale in (0.01, YARN_SCALE) for h in (16, 128)]
    rows += [PrefillCase(3, 333, h_q=16, q_gain=gain) for gain in (0.0, 8.0)]
    rows += [PrefillCase(3, topk, h_q=h, few_rows=True) for topk in (64, 1152) for h in (16, 128)]
    return _numbered(rows)


FULL_COUNT = 1000
_FULL_KEYS_LIMIT, _FULL_HEADS_LIMIT = 60_000, 20_000  # keys and query heads of all query tokens


@cache
def full(count: int = FULL_COUNT) -> tuple[PrefillCase, ...]:
    """`count` calls drawn from the product of all options, each option dealt evenly; the work of one is bounded."""
    rng = random.Random(22)
    deck = {
        "s_q": _Deck(rng, TOKENS),
        "topk": _Deck(rng, WIDTHS + ("any",) * 5),
        "h_q": _Deck(rng, HEADS),
        "s_kv": _Deck(rng, ROWS),
        "d_qk": _Deck(rng, (576, 576, 512)),
        "invalid": _Deck(rng, INVALID[:-1] * 3 + ("all",)),
        "invalid_value": _Deck(rng, INVALID_VALUES + (None,) * 6),
        "length": _Deck(rng, ("none",) * 6 + LENGTHS),
        "few_rows": _Deck(rng, (False,) * 7 + (True,)),
        "requests": _Deck(rng, ("none",) * 4 + REQUESTS),
        "sink": _Deck(rng, ("none", "none", "none", "mixed", "mixed", "-inf", "+inf")),
        "softmax_scale": _Deck(rng, (None,) * 6 + (0.01, YARN_SCALE)),
        "q_gain": _Deck(rng, (1.0,) * 6 + (6.0,)),
        "q_layout": _Deck(rng, Q_LAYOUTS + ("dense",) * 2),
        "kv_layout": _Deck(rng, KV_LAYOUTS + ("dense",) * 2),
        "out_layout": _Deck(rng, Q_LAYOUTS + ("dense",) * 2),
        "poison": _Deck(rng, ("nan", "inf")),
    }
    rows = []
    while len(rows) < count:
        drawn = {name: cards.deal() for name, cards in deck.items()}
        if drawn["topk"] == "any":
            drawn["topk"] = int(2 ** rng.uniform(0, 11.1))
        case = PrefillCase(**drawn)
        while (case.keys > _FULL_KEYS_LIMIT or case.s_q * case.h_q > _FULL_HEADS_LIMIT) and case.s_q > 1:
            case = replace(case, s_q=case.s_q // 2)
        rows.append(case)
    return _numbered(rows)


SUITES = {"smoke": smoke, "corner": corner, "full": full}


def suite(name: str) -> tuple[PrefillCase, ...]:
    """The cases of a suite; `full` contains the corner cases too. Raises ValueError on another name."""
    return pick(SUITES, name)
