// cp.async.mbarrier.arrive: cp.async copies that complete on an mbarrier.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// Arrives once all cp.async of this thread that were issued before have landed. One of the arrivals that the barrier was
// initialised with (noinc).
__device__ __forceinline__ void cp_async_mbarrier_arrive_noinc(uint32_t bar) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(bar) : "memory");
}

}  // namespace flashmla::ptx
