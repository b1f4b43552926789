// ld.global: loads that ptxas keeps in front of a later barrier, which it does not with ld.global.nc; and past the L1.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

__device__ __forceinline__ int32_t ld_global(const void* addr) {
  int32_t v;
  asm volatile("ld.global.b32 %0, [%1];" : "=r"(v) : "l"(addr) : "memory");
  return v;
}

__device__ __forceinline__ uint4 ld_global_v4(const void* addr) {
  uint4 v;
  asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(addr)
               : "memory");
  return v;
}

// From the L2, whatever the L1 holds, and into no L1: a value that another kernel may be writing.
__device__ __forceinline__ int32_t ld_relaxed(const void* addr) {
  int32_t v;
  asm volatile("ld.relaxed.gpu.global.b32 %0, [%1];" : "=r"(v) : "l"(addr) : "memory");
  return v;
}

}  // namespace flashmla::ptx
