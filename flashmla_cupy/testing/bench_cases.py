"""The rows that are benchmarked: the shapes in which this project states its figures."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

from flashmla_cupy.kv_format import FORMATS, V32, KVFormat

PAGE_SIZE = 64


@dataclass(frozen=True)
class BenchCase:
    """bf16, page 64, h_kv 1, d_qk 576. s_k: tokens of every request, or the mean of the normal distribution with
    `varlen`. small: latency row, measured inside a CUDA graph over caches that are cold in L2. fp8: over an FP8
    cache (v32), else as the row without: same q, lengths, pages and FLOP, so that the times of both compare.
    """

    batch: int
    h_q: int
    s_q: int
    s_k: int
    varlen: bool = False
    causal: bool = False
    small: bool = False
    fp8: bool = False

    h_kv: int = 1
    d_qk: int = 576
    d_v: int = 512

    @property
    def name(self) -> str:
        """As in the tables: "128,128,1,4096 varlen"; small rows start with "graph". Over an FP8 cache, among the sparse
        rows: "dense 128,128,1,8192".
        """
        words = ["graph"] * self.small + ["dense"] * self.fp8 + [f"{self.batch},{self.h_q},{self.s_q},{self.s_k}"]
        return " ".join(words + ["varlen"] * self.varlen + ["causal"] * self.causal)

    @property
    def token_bytes(self) -> int:
        """Of a token in the cache."""
        return V32.bytes_per_token if self.fp8 else self.h_kv * self.d_qk * 2

    def lengths(self) -> list[int]:
        """KV tokens of each request."""
        if not self.varlen:
            return [self.s_k] * self.batch
        rng = random.Random(0)
        return [max(int(rng.normalvariate(self.s_k, self.s_k / 2)), self.s_q) for _ in range(self.batch)]


LARGE = tuple(BenchCase(128, 128, s_q, s_k) for s_q in (1, 2) for s_k in (4096, 8192, 16384, 32768)) + (
    BenchCase(128, 128, 1, 4096, varlen=True),
    BenchCase(128, 128, 2, 8192, causal=True),
    BenchCase(128, 16, 1, 8192),
    BenchCase(128, 64, 1, 8192),
    BenchCase(128, 16, 1, 32768),
    BenchCase(16, 128, 1, 32768),
)
SMALL = tuple(
    BenchCase(*row, small=True)
    for row in (
        (1, 128, 1, 512),
        (1, 128, 1, 4096),
        (1, 128, 1, 32768),
        (1, 128, 1, 131072),
        (1, 16, 1, 4096),
        (1, 16, 1, 131072),
        (4, 128, 1, 1024),
        (8, 128, 1, 4096),
        (16, 128, 2, 4096),
        (32, 16, 1, 8192),
    )
)
DENSE_DECODE = LARGE + SMALL


@dataclass(frozen=True)
class SparseBenchCase:
    """bf16 q, FP8 cache; every query token attends to random slots of its own request, s_k tokens long.

    extra_topk: indices into a second cache with as many tokens. small: as in BenchCase.
    """

    batch: int
    h_q: int
    s_q: int
    topk: int
    s_k: int
    small: bool = False
    extra_topk: int = 0
    d_qk: int = 576
    page_size: int = PAGE_SIZE

    d_v: int = 512
    extra_page_size: int = PAGE_SIZE

    @property
    def name(self) -> str:
        """As in the tables: "128,64,2,128+512 d512"; small rows start with "graph"."""
        topk = f"{self.topk}+{self.extra_topk}" if self.extra_topk else str(self.topk)
        words = ["graph"] * self.small + [f"{self.batch},{self.h_q},{self.s_q},{topk}"]
        return " ".join(words + ["d512"] * (self.d_qk == 512))

    @property
    def keys(self) -> int:
        """Tokens that all query tokens attend to, each as often as it is named."""
        return self.batch * self.s_q * (self.topk + self.extra_topk)


SPARSE_DECODE = tuple(
    SparseBenchCase(*row)
    for row in (
        (128, 128, 2, 2048, 8192),
        (128, 128, 1, 2048, 8192),
        (128, 64, 2, 2048, 8192),
        (128, 64, 1, 2048, 8192),
        (128, 128, 2, 32768, 32768),
        (128, 64, 2, 128, 16384, False, 512, 512, 256),
        (128, 128, 2, 128, 16384, False, 1024, 512, 256),
        (1, 128, 1, 2048, 32768, True),
        (2, 128, 2, 2048, 32768, True),
        (8, 128, 1, 2048, 32768, True),
        (16, 128, 1, 2048, 16384, True),
    )
)


@dataclass(frozen=True)
class PrefillBenchCase:
    """Sparse prefill, bf16: every query token attends to topk random rows of kv."""

    s_q: int
    s_kv: int
    h_q: int
    topk: int
    d_qk: int = 576
    small: bool = False

    d_v: int = 512

    @property
    def name(self) -> str:
        """As in the tables: "4096,32768,128,1024 d512"."""
        words = [f"{self.s_q},{self.s_kv},{self.h_q},{self.topk}"]
        return " ".join(words + ["d512"] * (self.d_qk == 512))


SPARSE_PREFILL = tuple(
    PrefillBenchCase(4096, *row)
    for row in (
        (8192, 128, 2048),
        (32768, 128, 2048),
        (131072, 128, 2048),
        (32768, 64, 2048),
        (32768, 64, 512, 512),
        (32768, 128, 1024, 512),
        (32768, 32, 2048),
        (32768, 16, 2048),
        (32768, 8, 2048),
    )
)
FP8_DENSE = tuple(BenchCase(128, h_q, 1, 8192, fp8=True) for h_q in (128, 16, 64))  # each is in DENSE_DECODE, in bf16


@dataclass(frozen=True)
class KvQuantBenchCase:
    """A whole cache from `dtype` to FP8 ("quantize") or back ("dequantize")."""

    layout: str
    dtype: str
    direction: str
    tokens: int = 1 << 20
    small: bool = False

    page_size: int = PAGE_SIZE

    @property
    def name(self) -> str:
        """As in the tables: "v32 bfloat16 quantize"."""
        return f"{self.layout} {self.dtype} {self.direction}"

    @property
    def format(self) -> KVFormat:
        return FORMATS[self.layout]


KV_QUANT = tuple(
    KvQuantBenchCase(*row) for row in itertools.product(FORMATS, ("bfloat16", "float32"), ("quantize", "dequantize"))
)
AnyCase = BenchCase | SparseBenchCase | PrefillBenchCase | KvQuantBenchCase
ROWS = {
    "dense_decode": DENSE_DECODE,
    "sparse_decode": SPARSE_DECODE + FP8_DENSE,
    "sparse_prefill": SPARSE_PREFILL,
    "kv_quant": KV_QUANT,
}


def select(pattern: str | None, op: str = "dense_decode") -> tuple[AnyCase, ...]:
    """Rows of `op` whose name contains `pattern` (None: all). Raises ValueError when there is none."""
    rows = tuple(case for case in ROWS[op] if pattern is None or pattern in case.name)
    if not rows:
        raise ValueError(f"case: got {pattern!r}, expected part of a name such as {ROWS[op][0].name!r}")
    return rows
