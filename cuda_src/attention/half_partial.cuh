// Partial results in 16 bits. Storing and merging partial outputs is a third of a small batch's time, and that is bytes. A
// row's 256 columns are fp16, multiplied by a power of two that brings the largest near the top of the range: an error of
// 2^-12 of a value, an eighth of what rounding the result to bf16 costs. The inverse of the power lies behind the lse's.
#pragma once
#include "common/types.cuh"

namespace flashmla::attention {

// largest: of the magnitudes. The power of two by which it becomes 2^14 to 2^15; tiny ones stop at 2^126, infinite ones
// (and NaN, which wins no maximum) at 2^-114.
__device__ __forceinline__ float half_partial_factor(float largest) {
  return __uint_as_float(min(268u - (__float_as_uint(largest) >> 23), 253u) << 23);
}
__device__ __forceinline__ float inverse_power_of_two(float x) { return __uint_as_float((254u << 23) - __float_as_uint(x)); }

// The largest magnitude of a row of a 64 x 256 accumulator, which a quad holds. kOffset 0 | 2: the thread's first or second row.
template <int kOffset>
__device__ __forceinline__ float largest_of_row(const float (&o)[128]) {
  float largest = 0.0f;
#pragma unroll
  for (int i = 0; i < 32; i++) largest = fmaxf(largest, fmaxf(fabsf(o[4 * i + kOffset]), fabsf(o[4 * i + kOffset + 1])));
  largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
  return fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
}

// The factors of `rows` rows of all slots, (row, 512 / 256), behind as many lse's.
template <class Float>
__device__ __forceinline__ Float* half_partial_factors(Float* lse_partial, int64_t rows) { return lse_partial + rows; }

}  // namespace flashmla::attention
