// elect.sync: picks one lane of a converged warp. ptxas then knows that one thread runs, and feeds the copy engine
// from uniform registers without a loop over the lanes.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

__device__ __forceinline__ bool elect_sync() {
  uint32_t elected;
  asm volatile(
      "{\n\t.reg .pred p;\n\t"
      "elect.sync _|p, 0xffffffff;\n\t"
      "selp.u32 %0, 1, 0, p;\n\t}"
      : "=r"(elected));
  return elected != 0;
}

}  // namespace flashmla::ptx
