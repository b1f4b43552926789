// Fences between the generic proxy (ordinary loads and stores) and the async proxy (TMA, wgmma).
#pragma once

namespace flashmla::ptx {

// Makes this thread's shared-memory stores visible to wgmma and TMA operations issued after the next barrier.
__device__ __forceinline__ void fence_proxy_async() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Makes mbarrier_init visible to the async proxy.
__device__ __forceinline__ void fence_mbarrier_init() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

}  // namespace flashmla::ptx
