// Writing a 64 x 256 float32 accumulator to global memory without staging it in shared memory.
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

template <int kOffset>
__device__ __forceinline__ void store_row_f32(const float (&o)[128], float inv_sum, float* row) {
  const bool odd = tile::lane_id() & 1;
  const int col = (tile::lane_id() & 2) * 2 + (odd ? 8 : 0);
#pragma unroll
  for (int i = 0; i < 16; i++) {  // two groups of 8 columns: even lanes collect the first, odd lanes the second
    const int k = 8 * i + kOffset;
    const float2 a = make_float2(normalised(o[k], inv_sum), normalised(o[k + 1], inv_sum));
    const float2 b = make_float2(normalised(o[k + 4], inv_sum), normalised(o[k + 5], inv_sum));
    const float2 other = make_float2(__shfl_xor_sync(0xffffffffu, odd ? a.x : b.x, 1),
                                     __shfl_xor_sync(0xffffffffu, odd ? a.y : b.y, 1));
    if (row != nullptr)
      *reinterpret_cast<float4*>(row + 16 * i + col) =
          odd ? make_float4(other.x, other.y, b.x, b.y) : make_float4(a.x, a.y, other.x, other.y);
  }
}

}  // namespace flashmla::attention
