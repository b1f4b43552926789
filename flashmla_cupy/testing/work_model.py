"""What a benchmark row counts as work, so that TFLOP/s and GB/s mean the same for every kernel measured."""

from __future__ import annotations

from dataclasses import dataclass

from flashmla_cupy.kv_format import FORMATS
from flashmla_cupy.testing.bench_cases import AnyCase, BenchCase, KvQuantBenchCase, PrefillBenchCase, SparseBenchCase
from flashmla_cupy.testing.inputs import DTYPES

# Measured on one H200 (SXM): read bandwidth, and the matrix rate of this mix with operands resident on chip.
H200_READ_GBPS = 4420.0
H200_MATRIX_TFLOPS = 880.0


@dataclass(frozen=True)
class Work:
    """flop: both matrix products over the whole (unmasked) rectangle. byte: KV once, Q and O once.

    Of a cache conversion: no flop, and the bytes read and written.
    """

    flop: float
    byte: float

    def tflops(self, us: float) -> float:
        return self.flop / us / 1e6

    def gbps(self, us: float) -> float:
        return self.byte / us / 1e3

    @property
    def intensity(self) -> float:
        """FLOP per byte."""
        return self.flop / self.byte


def dense_decode(case: BenchCase) -> Work:
    lengths, widths = case.lengths(), case.d_qk + case.d_v
    mean = sum(lengths) / case.batch
    flop = 2.0 * case.batch * case.h_q * case.s_q * mean * widths
    byte = case.batch * (case.s_q * case.h_q * widths * 2 + mean * case.token_bytes)
    return Work(flop, byte)


def sparse_decode(case: SparseBenchCase) -> Work:
    """byte: Q, O and the row of every token as often as it is named (in layout d512 scales lie outside the rows)."""
    layout, widths = next(layout for layout in FORMATS.values() if layout.d_qk == case.d_qk), case.d_qk + case.d_v
    flop = 2.0 * case.h_q * case.keys * widths
    return Work(flop, case.keys * layout.row_bytes + 2.0 * case.batch * case.s_q * case.h_q * widths)


def sparse_prefill(case: PrefillBenchCase) -> Work:
    """byte: Q, O and the row of every key as often as it is named."""
    keys, widths = case.s_q * case.topk, case.d_qk + case.d_v
    return Work(2.0 * case.h_q * keys * widths, 2.0 * (keys * case.d_qk + case.s_q * case.h_q * widths))


def kv_quant(case: KvQuantBenchCase) -> Work:
    token_bytes = case.format.d_qk * DTYPES[case.dtype].itemsize + case.format.bytes_per_token
    return Work(0.0, float(case.tokens * token_bytes))


_MODELS = {
    BenchCase: dense_decode,
    SparseBenchCase: sparse_decode,
    PrefillBenchCase: sparse_prefill,
    KvQuantBenchCase: kv_quant,
}


def of(case: AnyCase) -> Work:
    return _MODELS[type(case)](case)
