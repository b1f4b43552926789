"""Dense decode cases over an FP8 cache: what one call looks like, and the three suites (pure data, no array library).

As in cases.py the data follow from `seed` alone, and everything that is no token of a request is poison.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from functools import cache

from flashmla_cupy.testing.cases import (
    CONTIGUOUS,
    INT_MAX,
    LENGTHS,
    Q_LAYOUTS,
    TABLES,
    UNUSED_ENTRIES,
    YARN_SCALE,
    _any_length,
    _Deck,
    _numbered,
    lengths_label,
    name_of,
    other_tables,
    pick,
)
from flashmla_cupy.testing.sparse_cases import CACHE_LAYOUTS, HEADS, LAYOUTS, POISONS, SCALES

PAGE_SIZES = (1, 16, 32, 48, 64, 128, 256, CONTIGUOUS)


@dataclass(frozen=True)
class Fp8DenseCase:
    """One call with is_fp8_kvcache=True and without indices; h_kv is 1, q bfloat16.

    lengths: KV tokens of each request, `len(lengths)` is the batch. page_size: tokens of a page, CONTIGUOUS for none.
    layout, cache_layout, scales, poison: of the cache, as in SparseCase. table, unused_entry, spare_pages: as in Case.
    """

    lengths: tuple[int, ...]
    s_q: int = 1
    h_q: int = 16
    layout: str = "v32"
    page_size: int = 64
    causal: bool = False
    cache_layout: str = "dense"
    scales: str = "quantized"
    softmax_scale: float | None = None
    q_gain: float = 1.0
    q_layout: str = "dense"
    out_layout: str = "dense"
    table: str = "exact"
    unused_entry: int | None = -1
    spare_pages: int = 3
    with_metadata: bool = True
    poison: str = "nan"
    unchanged: bool = False  # also require the same bits under every other poison, page stride and unused entry
    seed: int = 0

    @property
    def batch(self) -> int:
        return len(self.lengths)

    @property
    def d_qk(self) -> int:
        return {"v32": 576, "d512": 512}[self.layout]

    @property
    def keys(self) -> int:
        """Tokens of all requests, which the reference dequantizes."""
        return sum(self.lengths)

    @property
    def scores(self) -> int:
        return self.keys * self.s_q * self.h_q

    @property
    def name(self) -> str:
        """Short and unique within a suite, also among the sparse cases; readable in a failure line."""
        parts = [f"dense len={lengths_label(self.lengths)}", f"sq={self.s_q}", f"h={self.h_q}", self.layout]
        parts.append(f"page{self.page_size}" if self.page_size else "contiguous")
        if self.causal:
            parts.append("causal")
        return name_of(
            self, parts, scales="scales", kv="cache_layout", table="table", q="q_layout", out="out_layout"
        )

    def variants(self) -> list[Fp8DenseCase]:
        """The same tokens with every other content of what must not matter (used when `unchanged`)."""
        others = [replace(self, poison=poison) for poison in POISONS if poison != self.poison]
        others += [replace(self, cache_layout=kind) for kind in CACHE_LAYOUTS if kind != self.cache_layout]
        return others + other_tables(self)


@cache
def smoke() -> tuple[Fp8DenseCase, ...]:
    """Small calls that touch every kind once."""
    rows = [
        Fp8DenseCase((65, 0, 130), unchanged=True),
        Fp8DenseCase((200, 1), s_q=2, h_q=64, layout="d512", page_size=48, causal=True, table="wide"),
        Fp8DenseCase((100, 70), h_q=128, page_size=CONTIGUOUS, softmax_scale=0.1, with_metadata=False),
        Fp8DenseCase((63, 64, 65), s_q=3, h_q=8, page_size=16, causal=True, table="view", unused_entry=INT_MAX,
                     q_layout="head_view", out_layout="padded", scales="odd"),
        Fp8DenseCase((140, 20), h_q=3, layout="d512", page_size=1, cache_layout="interleaved", scales="spread"),
        Fp8DenseCase((300, 2), s_q=5, h_q=1, layout="d512", page_size=CONTIGUOUS, causal=True, cache_layout="padded"),
    ]
    return _numbered(rows)


@cache
def corner() -> tuple[Fp8DenseCase, ...]:
    """The kinds of input that broke other libraries: tails, tables, pages of any size, rows, scales, views."""
    rows = [
        # Nothing to attend to: an empty pool with a table of width 0, and empty requests between others.
        Fp8DenseCase((0,) * 16, spare_pages=0),
        Fp8DenseCase((0,) * 16, spare_pages=0, page_size=CONTIGUOUS, layout="d512"),
        Fp8DenseCase((0,) * 3, s_q=4, causal=True),
        Fp8DenseCase((0, 1, 0, 64, 65, 0), layout="d512", unchanged=True),
        Fp8DenseCase((0, 1, 0, 64, 65, 0), s_q=2, h_q=64, causal=True, unchanged=True),
        Fp8DenseCase((0, 0, 5000, 0), h_q=128),
    ]
    # Tails: every slot past the length, every unreferenced page and everything between pages is poison.
    rows += [
        Fp8DenseCase((1, 13, 63, 64, 65, 127), h_q=h_q, layout=layout, page_size=page, unchanged=True)
        for layout, h_q in (("v32", 16), ("d512", 128))
        for page in PAGE_SIZES
    ]
    # Tile remainders (s_q * h_q = 48, 80, 192, ...), lengths just above and below s_q.
    rows += [
        Fp8DenseCase((s_q + 1, s_q, 150, s_q - 1), s_q=s_q, h_q=h_q, layout=layout, page_size=page, causal=causal)
        for s_q in (1, 2, 3, 4, 5, 8)
        for h_q, layout, page, causal in ((16, "v32", 64, True), (64, "d512", 48, False), (128, "d512", 64, True))
    ]
    # Any head count.
    rows += [
        Fp8DenseCase((190, 67), s_q=3, h_q=h_q, layout=layout, causal=True)
        for h_q, layout in zip(HEADS, LAYOUTS * len(HEADS), strict=False)
    ]
    # Unused table entries, a table wider than needed.
    rows += [
        Fp8DenseCase((100, 64, 1), page_size=page, table=table, unused_entry=entry, unchanged=True)
        for table, page in zip(TABLES, (16, 64, 48), strict=True)
        for entry in UNUSED_ENTRIES
    ]
    # Views of larger buffers, strided caches.
    rows += [
        Fp8DenseCase((150, 90), s_q=2, h_q=8, layout=layout, q_layout=q, out_layout=out, cache_layout=kind)
        for layout, kinds in (("v32", CACHE_LAYOUTS), ("d512", CACHE_LAYOUTS[::-1]))
        for q, out, kind in zip(Q_LAYOUTS, Q_LAYOUTS[1:] + Q_LAYOUTS[:1], kinds, strict=True)
    ]
    # Scales that are no powers of two, and very different ones in a token; softmax scales, one-hot rows.
    rows += [Fp8DenseCase((133,), s_q=2, layout=layout, scales=scales) for layout in LAYOUTS for scales in SCALES]
    rows += [Fp8DenseCase((333,), h_q=h_q, softmax_scale=scale) for scale, h_q in ((0.01, 128), (YARN_SCALE, 16))]
    rows += [Fp8DenseCase((777, 64), q_gain=gain) for gain in (0.0, 8.0)]
    # Splits of a long request, prime lengths, many requests, plans made inside the call.
    rows += [
        Fp8DenseCase((1009,), h_q=16, page_size=256),
        Fp8DenseCase((8191,), s_q=2, h_q=64, page_size=1, causal=True),
        Fp8DenseCase((20011,), h_q=128, layout="d512", page_size=CONTIGUOUS),
        Fp8DenseCase((20011, 3, 0, 64), h_q=128, with_metadata=False),
        Fp8DenseCase((97,) * 200, layout="d512", page_size=32),
        Fp8DenseCase((64,) * 133, h_q=128),
    ]
    return _numbered(rows)


FULL_COUNT = 500
_FULL_SCORES_LIMIT = 40_000_000
_FULL_KEYS_LIMIT = 70_000


@cache
def full(count: int = FULL_COUNT) -> tuple[Fp8DenseCase, ...]:
    """`count` calls drawn from the product of all options, each option dealt evenly; the work of one is bounded."""
    rng = random.Random(22)
    deck = {
        "length": _Deck(rng, LENGTHS + ("varlen",) * 5),
        "batch": _Deck(rng, (1, 1, 2, 3, 4, 7, 16, 33)),
        "s_q": _Deck(rng, (1, 1, 2, 3, 4, 5, 8)),
        "h_q": _Deck(rng, HEADS),
        "layout": _Deck(rng, ("v32", "v32", "d512")),
        "page_size": _Deck(rng, PAGE_SIZES + (64, 64)),
        "causal": _Deck(rng, (False, True)),
        "cache_layout": _Deck(rng, CACHE_LAYOUTS + ("dense",) * 2),
        "scales": _Deck(rng, SCALES),
        "softmax_scale": _Deck(rng, (None,) * 6 + (0.01, YARN_SCALE)),
        "q_gain": _Deck(rng, (1.0,) * 6 + (6.0,)),
        "q_layout": _Deck(rng, Q_LAYOUTS + ("dense",) * 2),
        "out_layout": _Deck(rng, Q_LAYOUTS + ("dense",) * 2),
        "table": _Deck(rng, TABLES),
        "unused_entry": _Deck(rng, UNUSED_ENTRIES),
        "with_metadata": _Deck(rng, (True, True, True, False)),
        "poison": _Deck(rng, ("nan", "nan", "code_nan", "large")),
    }
    rows = []
    while len(rows) < count:
        drawn = {name: cards.deal() for name, cards in deck.items()}
        length, batch = drawn.pop("length"), drawn.pop("batch")
        lengths = (length,) * batch if length != "varlen" else tuple(_any_length(rng) for _ in range(batch))
        case = Fp8DenseCase(lengths, **drawn)
        while (case.keys > _FULL_KEYS_LIMIT or case.scores > _FULL_SCORES_LIMIT) and case.batch > 1:
            case = replace(case, lengths=case.lengths[: case.batch // 2])
        rows.append(case)
    return _numbered(rows)


SUITES = {"smoke": smoke, "corner": corner, "full": full}


def suite(name: str) -> tuple[Fp8DenseCase, ...]:
    """The cases of a suite; `full` contains the corner cases too. Raises ValueError on another name."""
    return pick(SUITES, name)
