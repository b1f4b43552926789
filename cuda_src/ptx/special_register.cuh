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

// The same for blockIdx.
__device__ __forceinline__ uint32_t ctaid_x() {
  uint32_t x;
  asm volatile("mov.u32 %0, %%ctaid.x;" : "=r"(x));
  return x;
}
__device__ __forceinline__ uint32_t ctaid_y() {
  uint32_t y;
  asm volatile("mov.u32 %0, %%ctaid.y;" : "=r"(y));
  return y;
}

}  // namespace flashmla::ptx
