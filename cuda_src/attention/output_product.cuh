// P V of one block of 64 tokens for a warpgroup's 64 x 256 part of the output, left running in a commit group.
#pragma once
#include "attention/output_tile.cuh"
#include "common/types.cuh"
#include "ptx/wgmma.cuh"
#include "ptx/wgmma_n256_ss.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::attention {

// O += P V, or O = P V with `first`; v_tiles: four tiles of 64 tokens x 64 dims. P in registers, or in its swizzled tile.
template <class Element>
__device__ __forceinline__ void start_product(float (&o)[128], const uint32_t (&p)[4][4], uint32_t v_tiles, bool first) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++) add_product<Element>(o, p[k], v_tiles, k, !first || k > 0);
  ptx::wgmma_commit_group();
}

template <class Element>
__device__ __forceinline__ void start_product(float (&o)[128], uint32_t p_smem, uint32_t v_tiles, bool first) {
  ptx::wgmma_fence();
#pragma unroll
  for (int k = 0; k < 4; k++)
    ptx::wgmma_m64n256k16_ss_mn<Element>(o, tile::advance(tile::k_major_desc(p_smem), k * tile::kKMajorStepBytes),
                                         tile::advance(tile::mn_major_desc(v_tiles), k * tile::kMnMajorStepBytes),
                                         !first || k > 0);
  ptx::wgmma_commit_group();
}

}  // namespace flashmla::attention
