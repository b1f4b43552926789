// Full / empty barrier rings between producers and consumers inside a CTA.
#pragma once
#include "common/types.cuh"
#include "ptx/mbarrier.cuh"

namespace flashmla::tile {

__device__ __forceinline__ void wait(uint32_t bar, uint32_t parity) {
  while (!ptx::mbarrier_try_wait_parity(bar, parity)) {
  }
}

// One arrival a warp; the warp's accesses before it are done when the barrier counts it.
__device__ __forceinline__ void arrive_once_per_warp(uint32_t bar) {
  __syncwarp();
  if ((threadIdx.x & 31) == 0) ptx::mbarrier_arrive(bar);
}

// Position in a ring of kStages slots. A consumer waits for parity `phase`, a producer for `phase ^ 1` (its first lap
// finds every slot empty).
template <int kStages>
struct RingPosition {
  int stage = 0;
  uint32_t phase = 0;
  __device__ __forceinline__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
};

}  // namespace flashmla::tile
