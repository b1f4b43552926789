// Conversions between pairs of e4m3 codes and wider floats (PTX ISA: cvt, sm_89 or higher).
#pragma once
#include "common/types.cuh"

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 890
#error "e4m3 conversions need sm_89 or higher"
#endif

namespace flashmla::ptx {

// Two floats to e4m3, to nearest even; magnitudes above 448 and Inf give 448, NaN gives 0x7f. `lo`: the low byte.
__device__ __forceinline__ uint16_t cvt_rn_satfinite_e4m3x2_f32(float lo, float hi) {
  uint16_t r;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(hi), "f"(lo));
  return r;
}

// Two e4m3 codes to packed fp16, exactly.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2(uint16_t codes) {
  uint32_t r;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"(codes));
  return r;
}

}  // namespace flashmla::ptx
