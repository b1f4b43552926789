// stmatrix: 8x8 blocks of 16-bit values from registers to shared memory.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

// Lane l gives the address of row (l % 8) of matrix (l / 8).
__device__ __forceinline__ void stmatrix_x4(uint32_t addr, uint32_t r0, uint32_t r1, uint32_t r2, uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(r0), "r"(r1),
               "r"(r2), "r"(r3)
               : "memory");
}

}  // namespace flashmla::ptx
