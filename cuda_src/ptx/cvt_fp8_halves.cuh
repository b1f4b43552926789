// Between e4m3 codes and packed fp16.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// The lower two of four e4m3 codes to packed fp16, exactly.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2_low(uint32_t codes) {
  uint32_t r;
  asm("{\n\t.reg .b16 lo, hi;\n\t"
      "mov.b32 {lo, hi}, %1;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, lo;\n\t}"
      : "=r"(r)
      : "r"(codes));
  return r;
}

// The higher two.
__device__ __forceinline__ uint32_t cvt_rn_f16x2_e4m3x2_high(uint32_t codes) {
  uint32_t r;
  asm("{\n\t.reg .b16 lo, hi;\n\t"
      "mov.b32 {lo, hi}, %1;\n\t"
      "cvt.rn.f16x2.e4m3x2 %0, hi;\n\t}"
      : "=r"(r)
      : "r"(codes));
  return r;
}

// Two pairs of packed fp16 to four e4m3 codes, to nearest even; magnitudes above 448 and Inf give 448, NaN gives 0x7f. One asm:
// ptxas 12.9 mixes up the 16-bit results where they are packed outside.
__device__ __forceinline__ uint32_t cvt_rn_satfinite_e4m3x4_f16x2(uint32_t halves01, uint32_t halves23) {
  uint32_t r;
  asm("{\n\t.reg .b16 lo, hi;\n\t"
      "cvt.rn.satfinite.e4m3x2.f16x2 lo, %1;\n\t"
      "cvt.rn.satfinite.e4m3x2.f16x2 hi, %2;\n\t"
      "mov.b32 %0, {lo, hi};\n\t}"
      : "=r"(r)
      : "r"(halves01), "r"(halves23));
  return r;
}

}  // namespace flashmla::ptx
