// Tensor memory accelerator (TMA): bulk tensor copies, global to shared, completing on an mbarrier.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// L2 cache policies as createpolicy.fractional would make them for the whole access.
constexpr uint64_t kL2EvictFirst = 0x12F0000000000000ull;
constexpr uint64_t kL2EvictNormal = 0x1000000000000000ull;

__device__ __forceinline__ void prefetch_tensormap(const TensorMap* map) {
  asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

__device__ __forceinline__ void cp_async_bulk_tensor_5d(uint32_t dst, const TensorMap* map, uint32_t bar, int32_t c0,
                                                        int32_t c1, int32_t c2, int32_t c3, int32_t c4,
                                                        uint64_t l2_policy) {
  asm volatile(
      "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint"
      " [%0], [%1, {%3, %4, %5, %6, %7}], [%2], %8;" ::"r"(dst),
      "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4), "l"(l2_policy)
      : "memory");
}

}  // namespace flashmla::ptx
