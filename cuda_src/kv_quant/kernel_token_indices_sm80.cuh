// Positions of tokens in their requests -> indices into the paged cache, page * page_size + offset. A position that is
// negative or beyond the block table gives -1, and so does an index that int32 cannot hold (an unused table entry).
//
// grid    ceil(count / 256)
// block   256 threads, one index each
// PDL     everything is read and written after griddepcontrol.wait
#pragma once
#include "common/math.cuh"
#include "common/params.cuh"
#include "kv_quant/config.cuh"
#include "ptx/griddepcontrol.cuh"

namespace flashmla::kv_quant {

template <class Config>
__device__ __forceinline__ void kernel(const TokenIndicesParams& params) {
  ptx::griddepcontrol_wait();
  ptx::griddepcontrol_launch_dependents();
  const int64_t i = (int64_t)blockIdx.x * Config::kThreads + threadIdx.x;
  if (i >= params.count) return;
  const int32_t request = divide_by_magic((int32_t)i, params.per_request_magic, params.per_request_shift);
  const int32_t column = (int32_t)i - request * params.per_request;
  const int32_t position = params.positions[request * params.positions_stride + column];

  int64_t index = -1;
  if (position >= 0) {
    const int32_t entry = divide_by_magic(position, params.page_size_magic, params.page_size_shift);
    if (entry < params.table_width) {
      const int32_t page = params.block_table[request * params.block_table_stride + entry];
      if (page >= 0) index = (int64_t)page * params.page_size + (position - entry * params.page_size);
    }
  }
  params.indices[i] = index <= 0x7fffffff ? (int32_t)index : -1;
}

}  // namespace flashmla::kv_quant
