// e4m3 codes as floats.
#pragma once
#include "ptx/cvt_f16.cuh"
#include "ptx/cvt_fp8.cuh"

namespace flashmla::tile {

// Four codes, lowest byte first, exactly.
__device__ __forceinline__ void decode_e4m3x4(uint32_t codes, float* x) {
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const uint32_t pair = ptx::cvt_rn_f16x2_e4m3x2((uint16_t)(codes >> (16 * i)));
    x[2 * i] = ptx::cvt_f32_f16((uint16_t)pair);
    x[2 * i + 1] = ptx::cvt_f32_f16((uint16_t)(pair >> 16));
  }
}

}  // namespace flashmla::tile
