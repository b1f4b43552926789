#pragma once
#include "ptx/mbarrier.cuh"
namespace flashmla::ptx {

inline void cp_async_mbarrier_arrive_noinc(uint32_t bar) { mbarrier_update(bar, 1, 0); }

}  // namespace flashmla::ptx
