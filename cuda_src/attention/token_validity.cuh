// Blocks of 64 gathered tokens of which some do not exist: a bit a token, 16 of them a word.
#pragma once
#include "common/math.cuh"
#include "common/types.cuh"
#include "tile/fragment.cuh"

namespace flashmla::attention {

struct alignas(8) TokenValidity {
  uint16_t bits[4];  // token i of the block: bit i % 16 of word i / 16
};

// Scores of tokens that do not exist become -inf.
__device__ __forceinline__ void mask_invalid(float (&s)[32], const TokenValidity& valid) {
  if ((valid.bits[0] & valid.bits[1] & valid.bits[2] & valid.bits[3]) == 0xffff) return;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const uint32_t bits = valid.bits[i / 2] >> (8 * (i % 2) + tile::fragment_col());
#pragma unroll
    for (int j = 0; j < 2; j++)
      if ((bits >> j & 1) == 0) s[4 * i + j] = s[4 * i + 2 + j] = -infinity();
  }
}

}  // namespace flashmla::attention
