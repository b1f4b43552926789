// Named barriers among the warps of a CTA.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

__device__ __forceinline__ void bar_sync(uint32_t id, uint32_t threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

}  // namespace flashmla::ptx
