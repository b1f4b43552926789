// The P V side of the decode kernels: the tile of probabilities in shared memory, and a warpgroup's 64 x 256 part of the
// output.
#pragma once
#include "common/types.cuh"
#include "ptx/ldmatrix.cuh"
#include "ptx/wgmma.cuh"
#include "tile/fragment.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::attention {

// Where this lane's row of step k (16 of the 64 tokens) of this warp's 16 rows of P lies, for stmatrix and ldmatrix.
__device__ __forceinline__ uint32_t p_fragment_addr(uint32_t p_smem, int k) {
  const int lane = tile::lane_id();
  return p_smem + tile::swizzle_128b(tile::warp_in_group() * 16 + (lane & 15), 2 * k + lane / 16);
}

// P as four steps of register operands.
template <class Element>
__device__ __forceinline__ void pack_probabilities(const float (&s)[32], uint32_t (&p)[4][4]) {
#pragma unroll
  for (int k = 0; k < 4; k++)
#pragma unroll
    for (int i = 0; i < 4; i++) p[k][i] = tile::pack<Element>(s[8 * k + 2 * i], s[8 * k + 2 * i + 1]);
}

// P of this warp's 16 rows into the swizzled tile.
__device__ __forceinline__ void store_probabilities(const uint32_t (&p)[4][4], uint32_t p_smem) {
#pragma unroll
  for (int k = 0; k < 4; k++) ptx::stmatrix_x4(p_fragment_addr(p_smem, k), p[k][0], p[k][1], p[k][2], p[k][3]);
}

// Multiplies the accumulated rows by their factors, where any of the warp's rows has one.
__device__ __forceinline__ void rescale_output(float rescale0, float rescale1, float (&o)[128]) {
  if (!__any_sync(0xffffffffu, rescale0 != 1.0f || rescale1 != 1.0f)) return;
#pragma unroll
  for (int i = 0; i < 128; i++) o[i] *= i & 2 ? rescale1 : rescale0;
}

// O += P V for one step of 16 tokens; v_tiles: four tiles of 64 tokens x 64 dims.
template <class Element>
__device__ __forceinline__ void add_product(float (&o)[128], const uint32_t (&p)[4], uint32_t v_tiles, int step,
                                            bool accumulate) {
  ptx::wgmma_m64n256k16_rs_mn<Element>(
      o, p, tile::advance(tile::mn_major_desc(v_tiles), step * tile::kMnMajorStepBytes), accumulate);
}

// O = rescale O + P V for one block of 64 tokens, left running in one commit group or two. `release` is called when P and
// the factors have been read. Registers hold three of the four steps of P; the fourth takes the place of the first once
// that is done with.
template <class Element, class Release>
__device__ __forceinline__ void start_block(float (&o)[128], uint32_t p_smem, const float* rescale, uint32_t v_tiles,
                                            bool first, Release release) {
  uint32_t p[3][4];
#pragma unroll
  for (int k = 0; k < 3; k++) ptx::ldmatrix_x4(p_fragment_addr(p_smem, k), p[k]);
  if (!first) rescale_output(rescale[tile::fragment_row()], rescale[tile::fragment_row() + 8], o);
  ptx::wgmma_fence();
  add_product<Element>(o, p[0], v_tiles, 0, !first);
  ptx::wgmma_commit_group();
  add_product<Element>(o, p[1], v_tiles, 1, true);
  add_product<Element>(o, p[2], v_tiles, 2, true);
  ptx::wgmma_commit_group();
  ptx::wgmma_wait_group<1>();
  ptx::ldmatrix_x4(p_fragment_addr(p_smem, 3), p[0]);
  release();
  ptx::wgmma_fence();
  add_product<Element>(o, p[0], v_tiles, 3, true);
  ptx::wgmma_commit_group();
}

}  // namespace flashmla::attention
