// Integer helpers and constants shared by all kernels.
#pragma once
#include "common/types.cuh"

namespace flashmla {

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;

__device__ __forceinline__ constexpr int32_t ceil_div(int32_t a, int32_t b) { return (a + b - 1) / b; }
__device__ __forceinline__ float infinity() { return __int_as_float(0x7f800000); }

}  // namespace flashmla
