#pragma once
#include "ptx/mbarrier.cuh"
namespace flashmla::ptx {

inline void cp_async_bulk(uint32_t dst, const void* src, uint32_t bytes, uint32_t bar) {
  if (dst % 16 || (uintptr_t)src % 16 || bytes % 16) sim::die("misaligned bulk copy");
  memcpy(sim::at(dst), src, bytes);
  mbarrier_update(bar, 0, -(int)bytes);
}

}  // namespace flashmla::ptx
