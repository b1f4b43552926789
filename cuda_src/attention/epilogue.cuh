// Writing a 64 x 256 float32 accumulator to global memory as rows of 16-bit values, without staging it in shared memory.
#pragma once
#include "common/types.cuh"
#include "tile/fragment.cuh"

namespace flashmla::attention {

// A row that attended to nothing has inv_sum = 0 and becomes exactly 0, whatever the accumulator holds.
__device__ __forceinline__ float normalised(float o, float inv_sum) { return inv_sum == 0.0f ? 0.0f : o * inv_sum; }

// row: start of this half's 256 columns, 16-byte aligned; or null to skip the row. kOffset 0 | 2: first or second row.
template <class Element, int kOffset>
__device__ __forceinline__ void store_row_16bit(const float (&o)[128], float inv_sum, Element* row) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int k = 16 * i + 4 * j + kOffset;
      v[j] = tile::pack<Element>(normalised(o[k], inv_sum), normalised(o[k + 1], inv_sum));
    }
    tile::quad_transpose(v);
    if (row != nullptr)
      reinterpret_cast<uint4*>(row + 32 * i)[tile::lane_id() & 3] = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

}  // namespace flashmla::attention
