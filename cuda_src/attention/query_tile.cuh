// 64 rows of Q for a score warpgroup: the first steps of 16 dims as wgmma A fragments, the rest in shared memory. The
// functions are the steps of loading it, for the caller to put between other work.
#pragma once
#include "common/types.cuh"
#include "ptx/cp_async.cuh"
#include "ptx/ld_global.cuh"
#include "ptx/special_register.cuh"
#include "tile/fragment.cuh"
#include "tile/swizzle.cuh"

namespace flashmla::attention {

// The piece of dims 496-511 (32-byte swizzle) and, if there is one, the tile of dims 512-575: starts the copies. A thread
// copies one 16-byte column chunk of four rows. row_pointer(row) gives a row that exists.
template <bool kRope, class RowPointer>
__device__ __forceinline__ void copy_query_rest(RowPointer row_pointer, int rows, uint32_t q_rope, uint32_t q_piece) {
  const int column = ptx::tid_x() % 8;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = ptx::tid_x() % 128 / 8 + 16 * i;
    const uint4* src = reinterpret_cast<const uint4*>(row_pointer(row)) + column;
    const uint32_t bytes = row < rows ? 16 : 0;
    if (kRope) ptx::cp_async_16(q_rope + tile::swizzle_128b(row, column), src + 8 * 8, bytes);
    if (column >= 6) ptx::cp_async_16(q_piece + tile::swizzle_32b(row, column - 6), src + 8 * 7, bytes);
  }
}

// Starts the loads of the first kSteps x 16 dims, as they lie in memory: a lane loads 16 bytes of each of its two rows for two
// steps; the odd step left over as it is held. What waits between this and `arrange_query` keeps ptxas from moving the later
// loads behind the earlier.
template <int kSteps, class RowPointer>
__device__ __forceinline__ void request_query(RowPointer row_pointer, uint32_t (&q)[kSteps][4]) {
  static_assert(kSteps % 2 == 1, "an odd step is left over");
#pragma unroll
  for (int r = 0; r < 2; r++) {
    const auto* row = row_pointer(tile::fragment_row_again() + 8 * r);
    const uint4* src = reinterpret_cast<const uint4*>(row) + (tile::lane_id() & 3);
#pragma unroll
    for (int i = 0; i < kSteps / 2; i++) {
      const uint4 v = ptx::ld_global_v4(src + 4 * i);
      q[2 * i + r][0] = v.x;
      q[2 * i + r][1] = v.y;
      q[2 * i + r][2] = v.z;
      q[2 * i + r][3] = v.w;
    }
    const int32_t* odd = reinterpret_cast<const int32_t*>(row) + (tile::lane_id() & 3) + 8 * (kSteps - 1);
    q[kSteps - 1][r] = ptx::ld_global(odd);
    q[kSteps - 1][2 + r] = ptx::ld_global(odd + 4);
  }
}

// Makes wgmma A fragments of what was requested: four lanes trade, so that each holds its columns. Rows from `rows` on become
// zero: multiplying zeros takes the least power.
template <int kSteps>
__device__ __forceinline__ void arrange_query(int rows, uint32_t (&q)[kSteps][4]) {
  const uint32_t keep[2] = {tile::fragment_row_again() < rows ? ~0u : 0u, tile::fragment_row_again() + 8 < rows ? ~0u : 0u};
#pragma unroll
  for (int i = 0; i < 4; i++) q[kSteps - 1][i] &= keep[i % 2];
#pragma unroll
  for (int i = 0; i < kSteps / 2; i++) {
    uint32_t v[2][4];
#pragma unroll
    for (int r = 0; r < 2; r++) {
#pragma unroll
      for (int j = 0; j < 4; j++) v[r][j] = q[2 * i + r][j];
      tile::quad_transpose(v[r]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
      q[2 * i][r] = v[r][0] & keep[r];
      q[2 * i][2 + r] = v[r][1] & keep[r];
      q[2 * i + 1][r] = v[r][2] & keep[r];
      q[2 * i + 1][2 + r] = v[r][3] & keep[r];
    }
  }
}

}  // namespace flashmla::attention
