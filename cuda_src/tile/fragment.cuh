// Register fragments of a 64-row wgmma accumulator: which rows a thread holds, conversions, quad-wide reductions.
#pragma once
#include "common/types.cuh"
#include "ptx/math.cuh"
#include "ptx/special_register.cuh"

namespace flashmla::tile {

__device__ __forceinline__ int lane_id() { return threadIdx.x & 31; }
__device__ __forceinline__ int warp_in_group() { return (threadIdx.x >> 5) & 3; }

// A thread holds rows fragment_row() and fragment_row() + 8; the four lanes of a quad share them.
__device__ __forceinline__ int fragment_row() { return warp_in_group() * 16 + lane_id() / 4; }
// The same, worked out anew at each call: for use after loops whose registers are all taken.
__device__ __forceinline__ int fragment_row_again() {
  const int thread = ptx::tid_x() & 127;
  return thread / 32 * 16 + thread % 32 / 4;
}
// First of the two adjacent columns a thread holds in each group of 8.
__device__ __forceinline__ int fragment_col() { return (lane_id() & 3) * 2; }

// Of two values at once: their shuffles wait side by side.
__device__ __forceinline__ void quad_max(float& x, float& y) {
#pragma unroll
  for (int distance = 1; distance < 4; distance *= 2) {
    const float other_x = __shfl_xor_sync(0xffffffffu, x, distance), other_y = __shfl_xor_sync(0xffffffffu, y, distance);
    x = fmaxf(x, other_x);
    y = fmaxf(y, other_y);
  }
}

__device__ __forceinline__ float quad_sum(float x) {
  x += __shfl_xor_sync(0xffffffffu, x, 1);
  return x + __shfl_xor_sync(0xffffffffu, x, 2);
}

template <class Element>
__device__ __forceinline__ uint32_t pack(float lo, float hi);
template <>
__device__ __forceinline__ uint32_t pack<bf16_t>(float lo, float hi) { return ptx::cvt_rn_bf16x2(lo, hi); }
template <>
__device__ __forceinline__ uint32_t pack<fp16_t>(float lo, float hi) { return ptx::cvt_rn_f16x2(lo, hi); }

// v[i] of lane c (of a quad) is element (i, c) of a 4 x 4 matrix; afterwards it is element (c, i). Turns four column
// groups of two packed values per lane into 16 contiguous bytes per lane.
__device__ __forceinline__ void quad_transpose(uint32_t (&v)[4]) {
  const bool odd = lane_id() & 1, high = lane_id() & 2;
#pragma unroll
  for (int i = 0; i < 4; i += 2) {
    const uint32_t received = __shfl_xor_sync(0xffffffffu, odd ? v[i] : v[i + 1], 1);
    (odd ? v[i] : v[i + 1]) = received;
  }
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t received = __shfl_xor_sync(0xffffffffu, high ? v[i] : v[i + 2], 2);
    (high ? v[i] : v[i + 2]) = received;
  }
}

}  // namespace flashmla::tile
