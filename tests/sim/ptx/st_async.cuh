#pragma once
#include "ptx/mbarrier.cuh"
namespace flashmla::ptx {

inline void st_async_v4(uint32_t cluster_address, uint4 v, uint32_t cluster_bar) {
  memcpy(sim::at(cluster_address), &v, 16);
  mbarrier_update(cluster_bar, 0, -16);
}

}  // namespace flashmla::ptx
