"""Sparse decode cases over an FP8 cache: what one call looks like, and the three suites (pure data, no array library).

As in cases.py the data follow from `seed` alone, and everything that no counting index names is poison.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

from flashmla_cupy.testing.cases import INT_MAX, Q_LAYOUTS, YARN_SCALE, _Deck, _numbered, name_of, pick

INT_MIN = -(2**31)

HEADS = (1, 3, 8, 16, 24, 63, 64, 96, 126, 128, 192)
WIDTHS = (1, 6, 64, 100, 128, 133, 192, 256, 512, 576, 640, 1024, 1152, 2048, 2176)  # of index lists
PAGE_SIZES = (16, 32, 48, 64, 128, 256)
LAYOUTS = ("v32", "d512")
CACHE_LAYOUTS = ("dense", "interleaved", "offset", "padded")
INVALID = ("none", "random", "runs", "head", "tail", "all")  # where a list has indices that are no keys
INVALID_VALUES = ("-1", "-2", "INT_MIN", "capacity", "capacity+1", "INT_MAX")
LENGTHS = ("none", "zero", "one", "random", "negative", "beyond")  # topk_length
SINKS = ("none", "mixed", "-inf", "+inf")
SCALES = ("quantized", "odd", "spread")
POISONS = {"nan": 0xFF, "large": 0x7E, "code_nan": 0x7F, "zero": 0}  # the byte that fills what must not matter


@dataclass(frozen=True)
class SparseCase:
    """One sparse decode call.

    topk: indices of a query token. tokens: slots of the cache, rounded up to whole pages.
    invalid, invalid_value: where and what the indices are that name no slot (None: a mixture of all INVALID_VALUES).
    length: the kind of topk_length. few_slots: indices are drawn from five slots only, so most are named many times.
    scales: "quantized" arbitrary float32 of one magnitude, "odd" 0.75, 1.0039, 1/3, ..., "spread" 2^-13 to 2^10 within
    a token (powers of two in layout d512).
    extra_topk: indices into a second cache, 0 for none; extra_tokens, extra_page_size, extra_length are about it.
    """

    topk: int
    batch: int = 1
    s_q: int = 1
    h_q: int = 64
    layout: str = "v32"
    tokens: int = 300
    page_size: int = 64
    cache_layout: str = "dense"
    invalid: str = "none"
    invalid_value: str | None = None
    length: str = "none"
    few_slots: bool = False
    scales: str = "quantized"
    sink: str = "none"
    extra_topk: int = 0
    extra_tokens: int = 150
    extra_page_size: int = 64
    extra_length: str = "none"
    softmax_scale: float | None = None
    q_gain: float = 1.0
    q_layout: str = "dense"
    out_layout: str = "dense"
    with_metadata: bool = True
    poison: str = "nan"
    unchanged: bool = False  # also require the same bits under every other poison, invalid value and page stride
    seed: int = 0

    @property
    def d_qk(self) -> int:
        return {"v32": 576, "d512": 512}[self.layout]

    @property
    def keys(self) -> int:
        """Indices of all query tokens: what the reference's time and memory follow."""
        return self.batch * self.s_q * (self.topk + self.extra_topk)

    @property
    def rows(self) -> int:
        return self.batch * self.s_q * self.h_q

    @property
    def scores(self) -> int:
        return self.keys * self.h_q

    @property
    def planned_topk(self) -> int:
        """`topk` of get_mla_metadata: the KV blocks of both lists, in tokens."""
        return -(-self.topk // 64) * 64 + self.extra_topk

    @property
    def name(self) -> str:
        """Short and unique within a suite; readable in a failure line."""
        parts = [f"b={self.batch}", f"sq={self.s_q}", f"h={self.h_q}", f"topk={self.topk}", self.layout]
        parts.append(f"page{self.page_size}x{-(-self.tokens // self.page_size)}")
        if self.extra_topk:
            parts.append(f"extra={self.extra_topk}/page{self.extra_page_size}")
        if self.few_slots:
            parts.append("duplicates")
        return name_of(
            self, parts, invalid="invalid", value="invalid_value", length="length", extra_length="extra_length",
            scales="scales", sink="sink", kv="cache_layout", q="q_layout", out="out_layout",
        )

    def variants(self) -> list[SparseCase]:
        """The same keys with every other content of what must not matter (used when `unchanged`)."""
        others = [replace(self, poison=poison) for poison in POISONS if poison != self.poison]
        others += [replace(self, cache_layout=kind) for kind in CACHE_LAYOUTS if kind != self.cache_layout]
        if self.invalid != "none":
            others += [replace(self, invalid_value=value) for value in INVALID_VALUES if value != self.invalid_value]
        return others


def invalid_value(name: str, capacity: int) -> int:
    """The index that an entry of INVALID_VALUES stands for, in a cache of `capacity` slots."""
    values = {"-1": -1, "-2": -2, "INT_MIN": INT_MIN, "INT_MAX": INT_MAX}
    return values[name] if name in values else capacity + (name == "capacity+1")


@cache
def smoke() -> tuple[SparseCase, ...]:
    """Small calls that touch every kind once; seconds on a GPU and on the NumPy backend."""
    rows = [
        SparseCase(64),
        SparseCase(1, h_q=128),
        SparseCase(133, batch=2, h_q=128),
        SparseCase(100, batch=3, h_q=16, invalid="random", unchanged=True),
        SparseCase(128, s_q=2, h_q=16, layout="d512", invalid="runs", unchanged=True),
        SparseCase(70, batch=2, h_q=16, invalid="all"),
        SparseCase(192, batch=4, h_q=8, length="random"),
        SparseCase(64, batch=3, h_q=16, length="negative", layout="d512"),
        SparseCase(100, batch=2, h_q=63, sink="mixed", invalid="head"),
        SparseCase(64, batch=2, h_q=24, extra_topk=70, extra_page_size=48, extra_length="random", sink="mixed"),
        SparseCase(64, batch=2, h_q=16, extra_topk=133, extra_page_size=16, layout="d512", length="zero"),
        SparseCase(64, s_q=3, h_q=16, scales="odd", page_size=48, cache_layout="interleaved"),
        SparseCase(64, s_q=2, h_q=16, scales="spread", page_size=16, few_slots=True),
        SparseCase(64, s_q=5, h_q=3, q_layout="head_view", out_layout="head_view", cache_layout="offset"),
        SparseCase(6, batch=4, h_q=1, q_layout="padded", out_layout="swapped", with_metadata=False),
        SparseCase(576, h_q=192, softmax_scale=0.1, page_size=256, invalid="tail"),
    ]
    return _numbered(rows)


@cache
def corner() -> tuple[SparseCase, ...]:
    """The kinds of input that broke other libraries: invalid indices, scales, widths, strides, sinks, rows, views."""
    rows = []
    for layout in LAYOUTS:
        # Nothing to attend to: no length, no valid index, in every place of the batch.
        rows += [SparseCase(64, batch=4, h_q=h, layout=layout, length=length) for h in (16, 128)
                 for length in ("zero", "negative", "one", "beyond")]
        rows += [SparseCase(topk, batch=3, layout=layout, invalid="all", sink=sink) for topk in (1, 64, 200)
                 for sink in ("none", "mixed")]
        rows += [SparseCase(64, batch=2, layout=layout, tokens=0, invalid="all"),
                 SparseCase(64, batch=2, layout=layout, tokens=0, invalid="all", extra_topk=70, sink="mixed")]
        # Invalid indices while slot 0, the last slot and all slots that nobody names are NaN.
        rows += [SparseCase(130, batch=2, h_q=h, layout=layout, invalid=invalid, invalid_value=value, unchanged=True)
                 for invalid in ("random", "runs", "head", "tail") for value in ("-1", None) for h in (16, 128)]
        rows += [SparseCase(64, h_q=16, layout=layout, invalid="random", invalid_value=value, page_size=page)
                 for value in INVALID_VALUES for page in (16, 64)]
        # Scales that are no powers of two, and very different ones in a token.
        rows += [SparseCase(133, s_q=2, h_q=h, layout=layout, scales=scales) for scales in SCALES for h in (16, 128)]
        # Any width, alone and with a second list.
        rows += [SparseCase(topk, h_q=h, layout=layout, tokens=4096) for topk in WIDTHS for h in (16, 128)]
        rows += [SparseCase(topk, h_q=16, layout=layout, extra_topk=extra, extra_page_size=page, extra_length=length,
                            length=length, batch=3)
                 for topk, extra, page in ((64, 1, 48), (133, 64, 16), (128, 512, 64), (1, 640, 256), (576, 100, 32))
                 for length in ("none", "random", "negative")]
        rows += [SparseCase(64, layout=layout, batch=2, invalid="all", extra_topk=100, unchanged=True),
                 SparseCase(100, layout=layout, batch=2, extra_topk=64, invalid="runs", extra_length="zero")]
        # Page strides, contexts around a page.
        rows += [SparseCase(100, h_q=16, layout=layout, tokens=tokens, page_size=page, cache_layout=kind)
                 for tokens in (63, 64, 65, 4096) for page in (64, 48) for kind in CACHE_LAYOUTS]
        # Sinks, with the list in one piece, cut in a few and in many, and with nothing in the first pieces.
        rows += [SparseCase(topk, batch=batch, h_q=h, layout=layout, sink=sink, invalid=invalid)
                 for topk, batch in ((64, 140), (512, 30), (2048, 1)) for h in (16, 128)
                 for sink in SINKS[1:] for invalid in ("none", "head") if topk * batch * h <= 2_000_000]
    # Rows and head counts.
    rows += [SparseCase(70, batch=2, s_q=s_q, h_q=h) for s_q in (1, 2, 3, 4, 5, 8) for h in HEADS]
    # Views of larger buffers.
    rows += [SparseCase(100, batch=2, s_q=2, h_q=8, q_layout=q, out_layout=out, cache_layout=kind)
             for q, out in zip(Q_LAYOUTS, Q_LAYOUTS[1:] + Q_LAYOUTS[:1], strict=True) for kind in CACHE_LAYOUTS]
    # Softmax scales, one-hot rows, slots named many times, plans made inside the call.
    rows += [SparseCase(333, h_q=h, softmax_scale=scale) for scale in (0.01, YARN_SCALE) for h in (16, 128)]
    rows += [SparseCase(333, h_q=16, q_gain=gain) for gain in (0.0, 8.0)]
    rows += [SparseCase(topk, s_q=2, h_q=h, few_slots=True) for topk in (64, 1152) for h in (16, 128)]
    rows += [SparseCase(topk, batch=batch, h_q=128, with_metadata=False) for topk, batch in ((2176, 1), (64, 150))]
    return _numbered(rows)


FULL_COUNT = 1600
_FULL_KEYS_LIMIT, _FULL_ROWS_LIMIT = 33_000, 20_000  # rows: query heads of all query tokens


@cache
def full(count: int = FULL_COUNT) -> tuple[SparseCase, ...]:
    """`count` calls drawn from the product of all options, each option dealt evenly; the work of one is bounded."""
    rng = random.Random(21)
    deck = {
        "topk": _Deck(rng, WIDTHS + ("any",) * 5),
        "batch": _Deck(rng, (1, 1, 2, 3, 4, 7, 16, 33, 140)),
        "s_q": _Deck(rng, (1, 1, 2, 3, 4, 5, 8)),
        "h_q": _Deck(rng, HEADS),
        "layout": _Deck(rng, ("v32", "v32", "d512")),
        "tokens": _Deck(rng, (1, 63, 64, 65, 700, 4096, 9000)),
        "page_size": _Deck(rng, PAGE_SIZES + (64, 64, 1)),
        "cache_layout": _Deck(rng, CACHE_LAYOUTS + ("dense",) * 2),
        "invalid": _Deck(rng, INVALID[:-1] * 3 + ("all",)),
        "invalid_value": _Deck(rng, INVALID_VALUES + (None,) * 6),
        "length": _Deck(rng, ("none",) * 6 + LENGTHS),
        "few_slots": _Deck(rng, (False,) * 7 + (True,)),
        "scales": _Deck(rng, SCALES),
        "sink": _Deck(rng, ("none", "none", "none", "mixed", "mixed", "-inf", "+inf")),
        "extra_topk": _Deck(rng, (0,) * 8 + (1, 64, 100, 133, 512, 640, 1024)),
        "extra_tokens": _Deck(rng, (5, 200, 3000)),
        "extra_page_size": _Deck(rng, PAGE_SIZES),
        "extra_length": _Deck(rng, ("none",) * 4 + LENGTHS),
        "softmax_scale": _Deck(rng, (None,) * 6 + (0.01, YARN_SCALE)),
        "q_gain": _Deck(rng, (1.0,) * 6 + (6.0,)),
        "q_layout": _Deck(rng, Q_LAYOUTS + ("dense",) * 2),
        "out_layout": _Deck(rng, Q_LAYOUTS + ("dense",) * 2),
        "with_metadata": _Deck(rng, (True, True, True, False)),
        "poison": _Deck(rng, ("nan", "nan", "code_nan", "large")),
    }
    rows = []
    while len(rows) < count:
        drawn = {name: cards.deal() for name, cards in deck.items()}
        if drawn["topk"] == "any":
            drawn["topk"] = int(2 ** rng.uniform(0, 11.1))
        if not drawn["extra_topk"]:
            drawn["extra_length"] = "none"
        case = SparseCase(**drawn)
        while (case.keys > _FULL_KEYS_LIMIT or case.rows > _FULL_ROWS_LIMIT) and case.batch > 1:
            case = replace(case, batch=case.batch // 2)
        rows.append(case)
    return _numbered(rows)


SUITES = {"smoke": smoke, "corner": corner, "full": full}


def suite(name: str) -> tuple[SparseCase, ...]:
    """The sparse decode cases of a suite; `full` contains the corner cases too. Raises ValueError on another name."""
    return pick(SUITES, name)
