// 64 rows of Q for a score warpgroup: the first steps of 16 dims as wgmma A fragments, the rest in shared memory.
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

// The first kSteps x 16 dims, on their way to registers. A lane loads 16 bytes of its row for two steps; four lanes then
// trade, so that each holds its columns. The odd step left over is loaded as it is held.
template <int kSteps>
struct QueryLoads {
  static constexpr int kPairs = kSteps / 2, kOddStep = kSteps - 1;
  static_assert(kSteps % 2 == 1, "an odd step is left over");
  uint4 chunk[2][kPairs];
  uint32_t odd[4];

  // Starts the loads. What waits between this and `arrange` keeps ptxas from moving the later ones behind the earlier.
  template <class RowPointer>
  __device__ __forceinline__ void request(RowPointer row_pointer) {
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const auto* row = row_pointer(tile::fragment_row_again() + 8 * r);
      const uint4* src = reinterpret_cast<const uint4*>(row) + (tile::lane_id() & 3);
#pragma unroll
      for (int i = 0; i < kPairs; i++) chunk[r][i] = ptx::ld_global_v4(src + 4 * i);
      const int32_t* last = reinterpret_cast<const int32_t*>(row) + (tile::lane_id() & 3) + 8 * kOddStep;
      odd[r] = ptx::ld_global(last);
      odd[2 + r] = ptx::ld_global(last + 4);
    }
  }
  // Rows from `rows` on become zero: multiplying zeros takes the least power.
  __device__ __forceinline__ void arrange(int rows, uint32_t (&q)[kSteps][4]) const {
#pragma unroll
    for (int i = 0; i < 4; i++) q[kOddStep][i] = odd[i] & (tile::fragment_row_again() + 8 * (i % 2) < rows ? ~0u : 0u);
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const uint32_t keep = tile::fragment_row_again() + 8 * r < rows ? ~0u : 0u;
#pragma unroll
      for (int i = 0; i < kPairs; i++) {
        uint32_t v[4] = {chunk[r][i].x, chunk[r][i].y, chunk[r][i].z, chunk[r][i].w};
        tile::quad_transpose(v);
        q[2 * i][r] = v[0] & keep;
        q[2 * i][2 + r] = v[1] & keep;
        q[2 * i + 1][r] = v[2] & keep;
        q[2 * i + 1][2 + r] = v[3] & keep;
      }
    }
  }
};

}  // namespace flashmla::attention
