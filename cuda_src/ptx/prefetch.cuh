// prefetch: brings a line to a cache; no result, and no fault where the address is not mapped.
#pragma once

namespace flashmla::ptx {

__device__ __forceinline__ void prefetch_l2(const void* addr) { asm volatile("prefetch.global.L2 [%0];" ::"l"(addr)); }

}  // namespace flashmla::ptx
