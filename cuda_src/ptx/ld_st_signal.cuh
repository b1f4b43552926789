// A word in shared memory by which threads of a CTA signal (PTX ISA: ld, st with .relaxed and .acquire). Strong accesses: ptxas
// deletes a loop that waits by a weak load, asm volatile or not, for it may take it to end and has no effect.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// No release: that would be a MEMBAR.
__device__ __forceinline__ void st_relaxed_cta_shared(uint32_t addr, uint32_t v) {
  asm volatile("st.relaxed.cta.shared.b32 [%0], %1;" ::"r"(addr), "r"(v) : "memory");
}

__device__ __forceinline__ uint32_t ld_acquire_cta_shared(uint32_t addr) {
  uint32_t v;
  asm volatile("ld.acquire.cta.shared.b32 %0, [%1];" : "=r"(v) : "r"(addr) : "memory");
  return v;
}

}  // namespace flashmla::ptx
