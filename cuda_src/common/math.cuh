// Integer helpers and constants shared by all kernels.
#pragma once
#include "common/types.cuh"

namespace flashmla {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ constexpr int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }

// n / d for 0 <= n < 2^31 and a divisor known to the host, which passes shift = ceil(log2 d) - 1 and
// magic = ceil(2^(32 + shift) / d); d = 1 has magic 0. (Granlund and Montgomery, 1994.)
__device__ __forceinline__ int32_t divide_by_magic(int32_t n, uint32_t magic, int32_t shift) {
  return magic == 0 ? n : (int32_t)(__umulhi((uint32_t)n, magic) >> shift);
}

__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

}  // namespace flashmla
