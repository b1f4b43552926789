// cp.async.bulk: a run of bytes from global to shared memory by the copy engine, completing on an mbarrier.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// dst, src and bytes are multiples of 16.
__device__ __forceinline__ void cp_async_bulk(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
               "l"(src), "r"(bytes), "r"(bar)
               : "memory");
}

}  // namespace flashmla::ptx
