// Conversions of fp16 (PTX ISA: cvt).
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// fp16 to float, exactly.
__device__ __forceinline__ float cvt_f32_f16(uint16_t bits) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(bits));
  return r;
}

}  // namespace flashmla::ptx
