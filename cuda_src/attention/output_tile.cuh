// The P V side of the decode kernels: the tile of probabilities in shared memory, and a warpgroup's 64 x 256 part of the
// output.
#pragma once
#include "common/types.cuh"
#include "ptx/stmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::attention {

// P as four steps of register operands.
template <class Element>
__device__ __forceinline__ void pack_probabilities(const float (&s)[32], uint32_t (&p)[4][4]) {
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) p[k][i] = tile::pack<Element>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

// P of this warp's 16 rows into the swizzled tile; wgmma reads it after a fence_proxy_async, whose latency the caller may hide.
// thread: in the warpgroup.
__device__ __forceinline__ void store_probabilities(const uint32_t (&p)[4][4], uint32_t p_smem, int thread) {
  const uint32_t at = p_smem + tile::swizzle_128b(thread / 32 * 16 + thread % 16, thread % 32 / 16);
#pragma unroll
  for (int k = 0; k < 4; k++) ptx::stmatrix_x4(at ^ 32 * k, p[k][0], p[k][1], p[k][2], p[k][3]);  // 16 of the 64 tokens
}

// Multiplies the accumulated rows by their factors, where any of the warp's rows has one.
__device__ __forceinline__ void rescale_output(float rescale0, float rescale1, float (&o)[128]) {
  if (!__any_sync(0xffffffffu, rescale0 != 1.0f || rescale1 != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; i++) o[i] *= i & 2 ? rescale1 : rescale0;
}

// O += P V for one block of 64 tokens, left running in a commit group; P in its tile, v_tiles: four tiles of 64 tokens x 64
// dims. `first`: O = P V.
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
