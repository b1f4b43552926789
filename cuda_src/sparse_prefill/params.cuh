// Parameters of the sparse prefill kernel; runtime/params.py mirrors each field, as those of common/params.cuh. Strides are
// in elements.
#pragma once
#include "common/types.cuh"

namespace flashmla {

struct SparsePrefillParams {
  const void* q;               // (s_q, h_q, d_qk) bf16
  const void* kv;              // (s_kv, d_qk) bf16
  const int32_t* indices;      // (s_q, topk): rows of kv, or of the request's part of it; others are not read
  const int32_t* topk_length;  // (s_q) or null: topk
  const float* attn_sink;      // (h_q) natural-log logits or null
  const int32_t* cu_seqlens_q;   // (requests + 1) or null: one request
  const int32_t* cu_seqlens_kv;  // (requests + 1)
  void* out;                   // (s_q, h_q, 512) bf16
  float* max_logits;           // (s_q, h_q), largest scaled score
  float* lse;                  // (s_q, h_q), natural log, without the sink
  int64_t q_stride_token, q_stride_head;
  int64_t indices_stride_token;
  int64_t out_stride_token, out_stride_head;
  int64_t max_logits_stride_token, max_logits_stride_head;
  int64_t lse_stride_token, lse_stride_head;
  int32_t items;               // s_q * head_blocks: pieces of work, of 64 heads of one query token each
  int32_t head_blocks;         // ceil(h_q / 64)
  uint32_t head_blocks_magic;  // division by head_blocks, see common/math.cuh
  int32_t head_blocks_shift;
  int32_t h_q;
  int32_t s_kv;
  int32_t topk;
  int32_t requests;
  float scale_log2;            // sm_scale * log2(e)
  int32_t kv_row_bytes;        // between rows of kv
};

}  // namespace flashmla
