// cp.async: 16 bytes from global to shared memory by one thread, through no register of it.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// `bytes` 16, or 0 for zeros without reading `src`.
__device__ __forceinline__ void cp_async_16(uint32_t dst, const void* src, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}

// Until all of this thread's copies have arrived.
__device__ __forceinline__ void cp_async_wait_all() { asm volatile("cp.async.wait_all;" ::: "memory"); }

}  // namespace flashmla::ptx
