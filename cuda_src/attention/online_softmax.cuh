// Online softmax over 64 x 64 score tiles held as wgmma accumulators, in base 2 with the caller's scale folded in
// (FlashAttention). The running maximum is exact: the largest probability of a row is 1 and survives the rounding to
// 16 bits, which a lagging maximum would spoil for rows that one key dominates.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"
#include "ptx/math.cuh"
#include "tile/fragment.cuh"

namespace flashmla::attention {

// Below every score and finite, so that a row that has seen nothing needs no special case: 2^(-inf - kNothing) is 0,
// and the log-sum-exp kNothing + log2(0) is -inf.
constexpr float kNothing = -1e30f;

struct RowState {
  float max_log2;  // running maximum, in log2 units; kNothing at first
  float sum;       // this thread's share of the row sum, relative to max_log2; 0 at first

  // Takes the row maximum of a new tile (scaled, log2); returns the factor for what was accumulated before.
  __device__ __forceinline__ float update(float tile_max_log2) {
    float rescale = 1.0f;
    if (tile_max_log2 > max_log2) {
      rescale = ptx::ex2_approx_ftz(max_log2 - tile_max_log2);
      max_log2 = tile_max_log2;
      sum *= rescale;
    }
    return rescale;
  }
};

// Scores whose column (token) is not below the row's limit become -inf; what was there (NaN included) is dropped.
__device__ __forceinline__ void mask_columns(float (&s)[32], int first_col, int limit0, int limit1) {
  const int col = first_col + tile::fragment_col();
#pragma unroll
  for (int i = 0; i < 8; i++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      if (col + 8 * i + j >= limit0) s[4 * i + j] = -infinity();
      if (col + 8 * i + j >= limit1) s[4 * i + 2 + j] = -infinity();
    }
  }
}

// Row maxima over the whole tile, unscaled.
__device__ __forceinline__ void row_max(const float (&s)[32], float& max0, float& max1) {
  max0 = fmaxf(s[0], s[1]);
  max1 = fmaxf(s[2], s[3]);
#pragma unroll
  for (int i = 1; i < 8; i++) {
    max0 = fmaxf(max0, fmaxf(s[4 * i], s[4 * i + 1]));
    max1 = fmaxf(max1, fmaxf(s[4 * i + 2], s[4 * i + 3]));
  }
  max0 = tile::quad_max(max0);
  max1 = tile::quad_max(max1);
}

// s becomes exp2(s * scale - max_log2), added to the sums.
__device__ __forceinline__ void exponentiate(float (&s)[32], float scale_log2, RowState& row0, RowState& row1) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
#pragma unroll
    for (int j = 0; j < 2; j++) {
      s[4 * i + j] = ptx::ex2_approx_ftz(s[4 * i + j] * scale_log2 - row0.max_log2);
      s[4 * i + 2 + j] = ptx::ex2_approx_ftz(s[4 * i + 2 + j] * scale_log2 - row1.max_log2);
      row0.sum += s[4 * i + j];
      row1.sum += s[4 * i + 2 + j];
    }
  }
}

}  // namespace flashmla::attention
