// Online softmax over 64 x 64 score tiles held as wgmma accumulators, in base 2 with the caller's scale folded in
// (FlashAttention). The maximum that probabilities are relative to follows the true one only where that matters, so that
// the output is rescaled in the first blocks and then hardly ever (the idea is FlashAttention-4's; the rule is ours).
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
  float max_log2;  // what probabilities are relative to, in log2 units; kNothing at first
  float sum;       // this thread's share of the row sum, relative to max_log2; 0 at first

  // Whether a new row maximum (log2 units) must become the reference. Relative to its row's maximum the largest
  // probability is 1, which the rounding to 16 bits keeps; relative to an older one it is rounded like all others. That
  // shows only where it outweighs the rest: so the maximum moves when the new probability exceeds a quarter of some
  // thread's share of the sum (then it may be more than 1/16 of the whole), or 2^8 (the range of fp16).
  __device__ __forceinline__ bool outgrown(float tile_max_log2) const {
    return (tile_max_log2 > max_log2) & (ptx::ex2_approx_ftz(tile_max_log2 - max_log2) > fminf(0.25f * sum, 256.0f));
  }
  // Makes a larger row maximum the reference; returns the factor for what was accumulated before.
  __device__ __forceinline__ float raise(float tile_max_log2) {
    if (tile_max_log2 <= max_log2) return 1.0f;
    const float rescale = ptx::ex2_approx_ftz(max_log2 - tile_max_log2);
    max_log2 = tile_max_log2;
    sum *= rescale;
    return rescale;
  }
};

// Takes the row maxima of a new tile (log2 units) and gives the factors for what was accumulated before: 1 for all rows
// of the warp unless the maximum of one of them must move. Returns whether one must.
__device__ __forceinline__ bool update_maxima(RowState& row0, RowState& row1, float tile_max0, float tile_max1,
                                              float& rescale0, float& rescale1) {
  rescale0 = rescale1 = 1.0f;
  if (!__any_sync(0xffffffffu, row0.outgrown(tile_max0) | row1.outgrown(tile_max1))) return false;
  rescale0 = row0.raise(tile_max0);
  rescale1 = row1.raise(tile_max1);
  return true;
}

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
  tile::quad_max(max0, max1);
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
