// Special registers, read where they are needed.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// threadIdx.x, read again at each call: what is derived from it does not stay in registers across a loop.
__device__ __forceinline__ uint32_t tid_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
  return x;
}

}  // namespace flashmla::ptx
