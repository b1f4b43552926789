// movmatrix: an 8x8 block of 16-bit values, two adjacent columns of row l / 4 in lane l, transposed between the lanes of a warp.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

__device__ __forceinline__ uint32_t movmatrix_trans(uint32_t a) {
  uint32_t r;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(a));
  return r;
}

}  // namespace flashmla::ptx
