// Kernel parameter structs. flashmla_cupy/runtime/params.py mirrors each field; the generated unit asserts
// sizes and offsets, so drift between the two is a compile error. Strides are in elements.
#pragma once
#include "common/types.cuh"

namespace flashmla {

struct DenseDecodeParams {
  TensorMap k_map;             // (64 | tokens of a page | d_qk / 64 | h_kv | pages), box (64, box_tokens, 1, 1, 1)
  TensorMap partial_map;       // o_partial as (512 | rows | h_kv * 2 * num_sm_parts), box of 128 bytes x 16 x 1; or zeros
  const void* q;               // (batch, s_q, h_q, d_qk) bf16 | fp16
  void* out;                   // (batch, s_q, h_q, 512) same type as q
  float* lse;                  // (batch, h_q, s_q), natural log
  float* o_partial;            // (2 * num_sm_parts, h_kv, rows, 512); of bf16 fp16, see attention/half_partial.cuh
  float* lse_partial;          // (2 * num_sm_parts, h_kv, rows), log2; behind them fp16's factors
  const int32_t* cache_seqlens;  // (batch)
  const int32_t* block_table;  // (batch, table_width) or null: page index = request (contiguous KV)
  const int32_t* metadata;     // (num_sm_parts, 8) or null: whole requests, as many to each part; then no o_partial either
  int64_t q_stride_batch, q_stride_token, q_stride_head;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head, lse_stride_token;
  int64_t block_table_stride;
  int32_t batch, s_q, heads_per_kv, h_kv;
  int32_t num_sm_parts;
  int32_t causal;              // 0 | 1
  int32_t page_size;           // tokens of a page
  int32_t box_tokens;          // tokens of one TMA box: min(64, page_size)
  int32_t max_seqlen;          // what the block table (or the contiguous cache) can hold; longer lengths are clipped
  float scale_log2;            // softmax_scale * log2(e)
  uint32_t heads_per_kv_magic; // division by heads_per_kv, see common/math.cuh
  int32_t heads_per_kv_shift;
};

// One list of cache slots to attend to, and the cache it points into.
struct SparseKeys {
  const uint8_t* cache;        // (pages, page_size, bytes of a token), pages page_stride bytes apart
  const int32_t* indices;      // (batch, s_q, topk): page * page_size + place in the page; others are not read
  const int32_t* topk_length;  // (batch) or null: topk
  int64_t page_stride;         // bytes
  int64_t indices_stride_batch, indices_stride_token;
  int32_t topk;                // 0: there is no such list
  int32_t num_pages;
  int32_t page_size;
  uint32_t page_size_magic;    // division by page_size, see common/math.cuh
  int32_t page_size_shift;
  int32_t reserved;
};

struct SparseDecodeParams {
  TensorMap k_map;             // paged, 656-byte layout: (328 | tokens of a page | 1 | 1 | pages) of 16 bits, box (64, 16, 1, 1, 1)
  SparseKeys main, extra;      // attention over the union; paged: main.cache alone
  const void* q;               // (batch, s_q, h_q, d_qk) bf16
  void* out;                   // (batch, s_q, h_q, 512) bf16
  float* lse;                  // (batch, h_q, s_q), natural log, without the sink
  float* o_partial;            // (2 * num_sm_parts, s_q * h_q, 512) fp16, see attention/half_partial.cuh; few rows: float
  float* lse_partial;          // (2 * num_sm_parts, s_q * h_q), log2; behind them fp16's factors
  const int32_t* metadata;     // (num_sm_parts, 8) or null: whole requests, as many to each part; then no o_partial either
  const float* attn_sink;      // (h_q) natural-log logits or null
  const int32_t* block_table;  // paged: (batch, table_width) or null: page index = request
  const int32_t* cache_seqlens;  // paged: (batch)
  int64_t q_stride_batch, q_stride_token, q_stride_head;
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head, lse_stride_token;
  int64_t block_table_stride;
  int32_t batch, s_q, h_q;
  int32_t num_sm_parts;
  int32_t causal;              // paged: 0 | 1
  int32_t max_seqlen;          // paged: what the block table (or the contiguous cache) can hold
  float scale_log2;            // softmax_scale * log2(e)
  uint32_t h_q_magic;          // division by h_q, see common/math.cuh
  int32_t h_q_shift;
  int32_t whole_boxes;         // 0 | 1: k_map is there, and 16 tokens from a multiple of 16 on lie in one page
};

struct CombineParams {
  const float* o_partial;      // by metadata: (2 * num_sm_parts, h_kv, rows, d_v); direct: (n_direct, rows, d_v)
  const float* lse_partial;    // by metadata: (2 * num_sm_parts, h_kv, rows), then fp16's factors; direct: (n_direct, rows)
  void* out;                   // (batch, s_q, h_q, d_v)
  float* lse;                  // (batch, h_q, s_q), natural log
  const int32_t* metadata;     // (num_sm_parts, 8) or null: direct mode
  const float* attn_sink;      // (h_q) natural-log logits or null
  int64_t out_stride_batch, out_stride_token, out_stride_head;
  int64_t lse_stride_batch, lse_stride_head, lse_stride_token;
  int32_t batch, s_q, heads_per_kv, h_kv;
  int32_t num_sm_parts;
  int32_t n_direct;
  int32_t d_v;                 // multiple of 4
  int32_t warps_per_row_shift; // 2^0 to 2^4 warps share the partials of one row
  float lse_in_scale;          // multiplies lse_partial to give log2 units: 1 | log2(e)
  uint32_t heads_per_kv_magic; // for divide_by_magic
  int32_t heads_per_kv_shift;
  int32_t column_groups_shift; // by metadata: 2^0 to 2^2 CTAs share the columns of a row
};

struct SchedMetaParams {
  const int32_t* cache_seqlens;  // (batch) or null when fixed_seqlen >= 0
  int32_t* metadata;           // (num_sm_parts, 8)
  int32_t* num_splits;         // (batch + 1)
  int64_t* cost_prefix;        // (batch + 1) scratch: exclusive prefix sum of blocks + overhead
  int32_t batch;
  int32_t num_sm_parts;
  int32_t block_size;          // tokens of a KV block: 64
  int32_t overhead_blocks;     // fixed cost of a fragment, in blocks
  int32_t fixed_seqlen;        // >= 0: every request has this length (sparse: topk)
  int32_t reserved;
};

struct KvQuantParams {
  void* kv;                    // tokens of d_qk bf16 | float: read by quantize, written by dequantize
  uint8_t* cache;              // pages of page_size tokens, see common/kv_format.cuh
  int64_t kv_stride_page, kv_stride_token;
  int64_t cache_stride_page;   // bytes
  int32_t tokens;              // the first this many, page after page
  int32_t page_size;
  uint32_t page_size_magic;    // division by page_size, see common/math.cuh
  int32_t page_size_shift;
  int32_t power_of_two_scales; // 0 | 1
  int32_t reserved;
};

struct TokenIndicesParams {
  const int32_t* block_table;  // (batch, table_width)
  const int32_t* positions;    // (batch, per_request)
  int32_t* indices;            // (batch, per_request), contiguous
  int64_t block_table_stride, positions_stride;
  int32_t count;               // batch * per_request
  int32_t per_request;
  uint32_t per_request_magic;  // division by per_request, see common/math.cuh
  int32_t per_request_shift;
  int32_t table_width;
  int32_t page_size;
  uint32_t page_size_magic;    // division by page_size
  int32_t page_size_shift;
};

}  // namespace flashmla
