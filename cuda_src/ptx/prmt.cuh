// prmt: four bytes chosen from two registers.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// Byte i of the result is byte (selector >> 4 i) & 7 of lo (0-3) and hi (4-7).
__device__ __forceinline__ uint32_t prmt(uint32_t lo, uint32_t hi, uint32_t selector) {
  uint32_t r;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(r) : "r"(lo), "r"(hi), "r"(selector));
  return r;
}

}  // namespace flashmla::ptx
