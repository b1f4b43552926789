"""Dense decode cases: what one call looks like, and the three suites drawn from it (pure data, no array library).

A case fixes shapes, lengths, layouts and the hostile content of everything a kernel must not read. The data follow
from `seed` alone, so a case that fails on one machine is the same case on every other.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import Any

HEAD_DIM_V = 512
INT_MAX = 2**31 - 1
CONTIGUOUS = 0  # page_size of a cache without a block table: (batch, s_k, h_kv, d_qk)

Q_LAYOUTS = ("dense", "head_view", "padded", "swapped")
CACHE_LAYOUTS = ("dense", "interleaved", "offset", "token_padded", "heads_first")
TABLES = ("exact", "wide", "view")
POISONS = ("nan", "inf", "zero")
UNUSED_ENTRIES = (-1, INT_MAX, None, 2147480000)  # None: the number of pages, one past the last valid id


@dataclass(frozen=True)
class Case:
    """One dense decode call.

    lengths: KV tokens of each request, `len(lengths)` is the batch. page_size: tokens of a page, CONTIGUOUS for none.
    softmax_scale None: d_qk ** -0.5. q_gain: multiplies q, large values make the softmax nearly one-hot.
    poison, unused_entry: what fills the cache slots and block-table entries that must not matter.
    with_metadata: the plan is computed by get_mla_metadata first; otherwise inside the call.
    """

    lengths: tuple[int, ...]
    s_q: int = 1
    h_q: int = 16
    h_kv: int = 1
    d_qk: int = 576
    dtype: str = "bfloat16"
    page_size: int = 64
    causal: bool = False
    softmax_scale: float | None = None
    q_gain: float = 1.0
    q_layout: str = "dense"
    out_layout: str = "dense"
    cache_layout: str = "dense"
    table: str = "exact"
    poison: str = "nan"
    unused_entry: int | None = -1
    spare_pages: int = 3
    with_metadata: bool = True
    unchanged: bool = False  # also require the same bits under every other poison and unused entry
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def scores(self) -> int:
        """Query-key pairs: what the reference's time and memory follow."""
        return sum(self.lengths) * self.h_q * self.s_q

    @property
    def name(self) -> str:
        """Short and unique within a suite; readable in a failure line."""
        cache = f"page{self.page_size}" if self.page_size else "contiguous"
        parts = [
            f"len={lengths_label(self.lengths)}",
            f"sq={self.s_q}",
            f"h={self.h_q}/{self.h_kv}",
            f"d{self.d_qk}",
            {"bfloat16": "bf16", "float16": "fp16"}[self.dtype],
            cache,
        ]
        if self.causal:
            parts.append("causal")
        return name_of(self, parts, q="q_layout", out="out_layout", kv="cache_layout", table="table")

    def variants(self) -> list[Case]:
        """The same data with every other content of what must not matter (used when `unchanged`)."""
        others = [replace(self, poison=poison) for poison in POISONS if poison != self.poison]
        return others + other_tables(self)


def name_of(case: Any, parts: list[str], **labels: str) -> str:
    """`parts`, label:value of each field (label=field) that has not its default, softmax scale, q_gain and seed."""
    defaults = {field.name: field.default for field in fields(case)}
    values = {label: getattr(case, name) for label, name in labels.items()}
    parts = parts + [f"{label}:{value}" for label, value in values.items() if value != defaults[labels[label]]]
    if case.softmax_scale is not None:
        parts.append(f"scale={case.softmax_scale:.4g}")
    if case.q_gain != 1.0:
        parts.append(f"gain={case.q_gain:g}")
    return " ".join(parts) + f" #{case.seed}"


def other_tables(case: Any) -> list[Any]:
    """`case` with every other content and width of its block table, if it has one."""
    return [
        replace(case, unused_entry=entry, table=table)
        for entry in UNUSED_ENTRIES
        for table in ("exact", "wide")
        if case.page_size != CONTIGUOUS and (entry, table) != (case.unused_entry, case.table)
    ]


def lengths_label(lengths: tuple[int, ...]) -> str:
    """"64", "64x3" for three of them, or the first four of different ones."""
    if len(set(lengths)) == 1:
        return f"{lengths[0]}" if len(lengths) == 1 else f"{lengths[0]}x{len(lengths)}"
    return ",".join(map(str, lengths[:4])) + (f",..({len(lengths)})" if len(lengths) > 4 else "")


HEADS = tuple(
    (h_q, h_kv) for h_q in (1, 3, 8, 9, 16, 24, 63, 64, 96, 126, 128) for h_kv in (1, 2, 3, 8) if h_q % h_kv == 0
)
LENGTHS = (0, 1, 20, 63, 64, 65, 140, 1000, 4096)
PAGE_SIZES = (16, 32, 64, 128, 256, CONTIGUOUS)
YARN_SCALE = (0.1 * 1.0 * 3.6888794541139363 + 1.0) ** 2 * 192**-0.5  # mscale(40)^2 / sqrt(192), DeepSeek's


@cache
def smoke() -> tuple[Case, ...]:
    """About twenty small calls that touch every kind once; seconds on a GPU and on the NumPy backend."""
    rows = [
        Case((64,), h_q=64),
        Case((1,), h_q=128),
        Case((65, 0, 130), h_q=16),
        Case((200, 1), s_q=2, h_q=64, causal=True),
        Case((63, 64, 65), s_q=3, h_q=16, causal=True),
        Case((0, 0), h_q=16),
        Case((300,), h_q=128, d_qk=512),
        Case((300, 20), h_q=24, dtype="float16"),
        Case((129,), h_q=9, h_kv=3, page_size=16),
        Case((129, 77), h_q=16, h_kv=2, page_size=32, cache_layout="heads_first"),
        Case((500,), h_q=8, page_size=128),
        Case((257, 3), h_q=3, page_size=256, cache_layout="interleaved"),
        Case((100, 70), h_q=64, page_size=CONTIGUOUS),
        Case((140,), s_q=5, h_q=16, q_layout="head_view", out_layout="head_view"),
        Case((140, 90), s_q=4, h_q=1, q_layout="padded", out_layout="padded"),
        Case((1000,), h_q=64, table="wide", unused_entry=INT_MAX, poison="inf"),
        Case((70, 2), h_q=63, table="view", unused_entry=None, cache_layout="offset"),
        Case((200,), h_q=16, softmax_scale=1.0, with_metadata=False),
        Case((400,), s_q=8, h_q=16, q_gain=8.0),
        Case((64, 128), s_q=2, h_q=16, q_layout="swapped", out_layout="swapped", cache_layout="token_padded"),
    ]
    return _numbered(rows)


@cache
def corner() -> tuple[Case, ...]:
    """The kinds of input that broke other libraries: lengths and rows, remainders, head counts, arguments, views."""
    rows = [
        # Nothing to attend to: an empty pool with a table of width 0, and empty requests between others.
        Case((0,) * 16, spare_pages=0),
        Case((0,) * 16, spare_pages=0, page_size=CONTIGUOUS),
        Case((0,) * 3, s_q=4, causal=True),
        Case((0, 1, 0, 64, 65, 0), unchanged=True),
        Case((0, 1, 0, 64, 65, 0), s_q=2, h_q=64, causal=True, unchanged=True),
        Case((0, 0, 5000, 0), h_q=128, unchanged=True),
    ]
    # Tails: every slot past the length and every unreferenced page is poison.
    for dtype in ("bfloat16", "float16"):
        for h_q in (16, 128):
            rows.append(Case((1, 13, 63, 64, 65, 127), h_q=h_q, dtype=dtype, unchanged=True))
    rows += [
        Case((length,), h_q=64, page_size=page, unchanged=True)
        for length in (1, 13, 63, 65, 127)
        for page in (16, 256, CONTIGUOUS)
    ]
    # Tile remainders (s_q * h_q = 48, 80, 192, ...), lengths just above and below s_q.
    rows += [
        Case((s_q + 1, s_q, 150, s_q - 1), s_q=s_q, h_q=h_q, causal=causal)
        for s_q in (1, 2, 3, 4, 5, 8)
        for h_q in (16, 64, 128)
        for causal in (False, True)
    ]
    # Any head count.
    rows += [Case((190, 67), s_q=s_q, h_q=h_q, h_kv=h_kv, causal=s_q > 1) for h_q, h_kv in HEADS for s_q in (1, 3)]
    # Unused table entries, a table wider than needed.
    rows += [
        Case((100, 64, 1), table=table, unused_entry=entry, unchanged=True)
        for table in TABLES
        for entry in UNUSED_ENTRIES
    ]
    # Views of larger buffers, strided caches.
    rows += [
        Case((150, 90), s_q=2, h_q=8, q_layout=q, out_layout=out, cache_layout=cache)
        for q, out in zip(Q_LAYOUTS, Q_LAYOUTS[1:] + Q_LAYOUTS[:1], strict=True)
        for cache in CACHE_LAYOUTS
    ]
    # Scales, one-hot rows, splits of a long request, prime lengths.
    rows += [Case((333,), h_q=h_q, softmax_scale=scale) for scale in (0.01, 1.0, YARN_SCALE) for h_q in (16, 128)]
    rows += [Case((777, 64), h_q=16, q_gain=gain) for gain in (0.0, 16.0, 64.0)]
    rows += [
        Case((length,), s_q=s_q, h_q=h_q, causal=s_q > 1)
        for length in (1009, 8191, 20011)
        for s_q, h_q in ((1, 16), (1, 128), (2, 64))
    ]
    rows += [
        Case((20011, 3, 0, 64), h_q=128, with_metadata=False),
        Case((97,) * 200, h_q=16),
        Case((64,) * 133, h_q=128),
    ]
    return _numbered(rows)


FULL_COUNT = 1600
_FULL_SCORES_LIMIT = 40_000_000
_FULL_CACHE_LIMIT = 33 * 4096 * 2  # KV tokens times KV heads


@cache
def full(count: int = FULL_COUNT) -> tuple[Case, ...]:
    """`count` calls drawn from the product of all options, each option dealt evenly; the work of one is bounded."""
    rng = random.Random(20)
    deck = {
        "length": _Deck(rng, LENGTHS + ("varlen",) * 5),
        "batch": _Deck(rng, (1, 1, 2, 3, 4, 7, 16, 33)),
        "s_q": _Deck(rng, (1, 1, 2, 3, 4, 5, 8)),
        "heads": _Deck(rng, HEADS),
        "causal": _Deck(rng, (False, True)),
        "page_size": _Deck(rng, PAGE_SIZES + (64, 64)),
        "dtype": _Deck(rng, ("bfloat16", "bfloat16", "float16")),
        "d_qk": _Deck(rng, (576, 576, 576, 512)),
        "q_layout": _Deck(rng, Q_LAYOUTS + ("dense",) * 2),
        "out_layout": _Deck(rng, Q_LAYOUTS + ("dense",) * 2),
        "cache_layout": _Deck(rng, CACHE_LAYOUTS + ("dense",) * 3),
        "table": _Deck(rng, TABLES),
        "poison": _Deck(rng, ("nan", "inf")),
        "unused_entry": _Deck(rng, UNUSED_ENTRIES),
        "softmax_scale": _Deck(rng, (None,) * 6 + (0.01, 1.0, YARN_SCALE)),
        "q_gain": _Deck(rng, (1.0,) * 6 + (6.0,)),
        "with_metadata": _Deck(rng, (True, True, True, False)),
    }
    rows = []
    while len(rows) < count:
        drawn = {name: cards.deal() for name, cards in deck.items()}
        length, batch, (h_q, h_kv) = drawn.pop("length"), drawn.pop("batch"), drawn.pop("heads")
        if drawn["softmax_scale"] == 1.0:
            drawn["q_gain"] = 1.0  # larger dot products are off by more than the lse may be in float32 alone
        lengths = (length,) * batch if length != "varlen" else tuple(_any_length(rng) for _ in range(batch))
        while (
            lengths
            and (sum(lengths) * h_q * drawn["s_q"] > _FULL_SCORES_LIMIT or sum(lengths) * h_kv > _FULL_CACHE_LIMIT)
            and len(lengths) > 1
        ):
            lengths = lengths[: len(lengths) // 2]
        rows.append(Case(lengths, h_q=h_q, h_kv=h_kv, **drawn))
    return _numbered(rows)


SUITES = {"smoke": smoke, "corner": corner, "full": full}


def suite(name: str) -> tuple[Case, ...]:
    """The dense decode cases of a suite; `full` contains the corner cases too. Raises ValueError on another name."""
    return pick(SUITES, name)


def pick(suites: dict[str, Callable[[], tuple]], name: str) -> tuple:
    if name not in suites:
        raise ValueError(f"suite: got {name!r}, expected one of {', '.join(suites)}")
    return suites["full"]() + suites["corner"]() if name == "full" else suites[name]()


class _Deck:
    """Deals the options in random order, every option once before any comes again."""

    def __init__(self, rng: random.Random, options: tuple):
        self._rng, self._options, self._left = rng, options, []

    def deal(self):
        if not self._left:
            self._left = list(self._options)
            self._rng.shuffle(self._left)
        return self._left.pop()


def _any_length(rng: random.Random) -> int:
    if rng.random() < 0.5:
        return rng.choice(LENGTHS[:-1])
    return int(2 ** rng.uniform(0, 12))


def _numbered(rows: list[Case]) -> tuple[Case, ...]:
    return tuple(replace(case, seed=seed) for seed, case in enumerate(rows, start=1))
