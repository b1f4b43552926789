// A value that the compiler takes as it is.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// x, kept in a register where it would otherwise be worked out again at each use. Without an instruction.
__device__ __forceinline__ int opaque(int x) {
  asm volatile("" : "+r"(x));
  return x;
}

}  // namespace flashmla::ptx
