// Writing a 64 x 256 float32 accumulator (two of 64 x 128) to global memory without staging it in shared memory.
#pragma once
#include "common/types.cuh"
#include "tile/fragment.cuh"

namespace flashmla::attention {

// A row that attended to nothing has inv_sum = 0 and becomes exactly 0, whatever the accumulator holds.
__device__ __forceinline__ float normalised(float o, float inv_sum) { return inv_sum == 0.0f ? 0.0f : o * inv_sum; }

// row: start of this half's 256 columns, 16-byte aligned; or null to skip the row. kOffset 0 | 2: first or second row.
template <class Element, int kOffset>
__device__ __forceinline__ void store_row_16bit(const float (&o)[2][64], float inv_sum, Element* row) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    uint32_t v[4];
#pragma unroll
    for (int j = 0; j < 4; j++) {
      const int k = 16 * (i % 4) + 4 * j + kOffset;
      v[j] = tile::pack<Element>(normalised(o[i / 4][k], inv_sum), normalised(o[i / 4][k + 1], inv_sum));
    }
    tile::quad_transpose(v);
    if (row != nullptr)
      reinterpret_cast<uint4*>(row + 32 * i)[tile::lane_id() & 3] = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

template <int kOffset>
__device__ __forceinline__ void store_row_f32(const float (&o)[2][64], float inv_sum, float* row) {
  if (row == nullptr) return;
#pragma unroll
  for (int i = 0; i < 32; i++)
    reinterpret_cast<float2*>(row + 8 * i)[tile::lane_id() & 3] =
        make_float2(normalised(o[i / 16][4 * (i % 16) + kOffset], inv_sum),
                    normalised(o[i / 16][4 * (i % 16) + kOffset + 1], inv_sum));
}

}  // namespace flashmla::attention
