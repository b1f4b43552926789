// What the score warpgroups of the FP8 decode kernels do for a query row: where it lies, what it may see, what it leaves.
#pragma once
#include "attention/online_softmax.cuh"
#include "common/params.cuh"
#include "ptx/math.cuh"
#include "sparse_decode/keys.cuh"
#include "tile/fragment.cuh"

namespace flashmla::sparse_decode {

// A query row in global memory; rows past the last give any.
template <class Config>
__device__ __forceinline__ const bf16_t* query_pointer(const SparseDecodeParams& params, int req, int local_row) {
  const QueryRow row = query_row<Config>(params, local_row);
  const bf16_t* q = reinterpret_cast<const bf16_t*>(params.q) + req * params.q_stride_batch;
  return row.exists ? q + row.token * params.q_stride_token + row.head * params.q_stride_head : q;
}

// 1 / row sum, and the attention sink where the request is whole; a split request meets its sink in combine.
__device__ __forceinline__ float output_factor(const SparseDecodeParams& params, const attention::RowState& state,
                                               const QueryRow& row, int slot) {
  if (state.sum == 0.0f) return 0.0f;
  if (params.attn_sink == nullptr || slot >= 0 || !row.exists) return 1.0f / state.sum;
  return 1.0f / (state.sum + ptx::ex2_approx_ftz(__ldg(params.attn_sink + row.head) * kLog2E - state.max_log2));
}

__device__ __forceinline__ void store_lse(const SparseDecodeParams& params, int slot, int req, const QueryRow& row,
                                          const attention::RowState& state) {
  if (!row.exists || (threadIdx.x & 3) != 0) return;
  const float lse_log2 = state.max_log2 + ptx::lg2_approx_ftz(state.sum);
  if (slot >= 0)
    params.lse_partial[((int64_t)slot * params.s_q + row.token) * params.h_q + row.head] = lse_log2;
  else
    params.lse[req * params.lse_stride_batch + row.head * params.lse_stride_head + row.token * params.lse_stride_token] =
        lse_log2 * kLn2;
}

// Paged: tokens past what each row sees (those past the end have no validity bit).
template <class Config>
__device__ __forceinline__ void mask_unseen(const SparseDecodeParams& params, int req, int block, float (&s)[32]) {
  const int seqlen = load_seqlen(params, req), first_col = block * Config::kBlock;
  if (first_col + Config::kBlock <= visible_tokens(params, seqlen, query_row<Config>(params, 0).token)) return;
  const int row = tile::fragment_row_again();
  attention::mask_columns(s, first_col, visible_tokens(params, seqlen, query_row<Config>(params, row).token),
                          visible_tokens(params, seqlen, query_row<Config>(params, row + 8).token));
}

}  // namespace flashmla::sparse_decode
