// Thread-block clusters: rank, barrier among all threads of the cluster, and addresses in another CTA's shared memory.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

__device__ __forceinline__ uint32_t cluster_ctarank() {
  uint32_t rank;
  asm volatile("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

// The same place in the shared memory of CTA `rank`, as a shared::cluster address.
__device__ __forceinline__ uint32_t mapa(uint32_t addr, uint32_t rank) {
  uint32_t remote;
  asm volatile("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(remote) : "r"(addr), "r"(rank));
  return remote;
}

// Not .aligned: after the roles have parted, nothing says that a warp's threads are together.
__device__ __forceinline__ void barrier_cluster_arrive() {
  asm volatile("barrier.cluster.arrive;" ::: "memory");
}

__device__ __forceinline__ void barrier_cluster_wait() { asm volatile("barrier.cluster.wait;" ::: "memory"); }

}  // namespace flashmla::ptx
