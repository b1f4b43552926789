// cp.async.bulk.prefetch.tensor: brings a box of a tensor to the L2 by the copy engine; no result, and nothing where it lies outside.
#pragma once
#include "common/types.cuh"

namespace flashmla::ptx {

__device__ __forceinline__ void cp_async_bulk_prefetch_tensor_5d(const TensorMap* map, int32_t c0, int32_t c1, int32_t c2,
                                                                 int32_t c3, int32_t c4) {
  asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %2, %3, %4, %5}];" ::"l"(map), "r"(c0), "r"(c1),
               "r"(c2), "r"(c3), "r"(c4)
               : "memory");
}

}  // namespace flashmla::ptx
