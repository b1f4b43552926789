// What a CTA of the sparse prefill works on: its items, and the tokens of their index lists.
#pragma once
#include "common/math.cuh"
#include "ptx/ld_st.cuh"
#include "ptx/prefetch.cuh"
#include "ptx/special_register.cuh"
#include "sparse_prefill/config.cuh"
#include "sparse_prefill/params.cuh"

namespace flashmla::sparse_prefill {

// A piece of work: up to 64 heads of one query token. The items of a token are neighbours, and so are the CTAs that work on
// them at the same time: what one gathers, the other finds in the L2.
struct Item {
  int token, first_head;
};
__device__ __forceinline__ Item item_at(const SparsePrefillParams& params, int item) {
  const int token = divide_by_magic(item, params.head_blocks_magic, params.head_blocks_shift);
  return {token, (item - token * params.head_blocks) * 64};
}

// Entries of a token's list that count.
__device__ __forceinline__ int list_length(const SparsePrefillParams& params, int token) {
  return params.topk_length == nullptr ? params.topk : min(max(__ldg(params.topk_length + token), 0), params.topk);
}
__device__ __forceinline__ int blocks_of(const SparsePrefillParams& params, int token) {
  return ceil_div(list_length(params, token), 64);
}

// The first of this CTA's items from `item` on that attends to anything.
__device__ __forceinline__ int next_item(const SparsePrefillParams& params, int item) {
  while (item < params.items && list_length(params, item_at(params, item).token) == 0) item += gridDim.x;
  return item;
}

// A row of Q of an item; rows past the last head give the last.
__device__ __forceinline__ const bf16_t* query_row(const SparsePrefillParams& params, const Item& item, int row) {
  return reinterpret_cast<const bf16_t*>(params.q) + item.token * params.q_stride_token +
         min(item.first_head + row, params.h_q - 1) * params.q_stride_head;
}

// Rows of kv that a query token may name: those of its request, none if it belongs to none. Offsets that decrease or go
// beyond kv give fewer rows, never a fault.
struct KeyRange {
  int first, rows;
};
__device__ __forceinline__ KeyRange keys_of(const SparsePrefillParams& params, int token) {
  if (params.cu_seqlens_q == nullptr) return {0, params.s_kv};
  int below = 0, above = params.requests + 1;  // the first offset beyond the token is among below..above
  while (below < above) {
    const int middle = (below + above) / 2;
    if (__ldg(params.cu_seqlens_q + middle) <= token)
      below = middle + 1;
    else
      above = middle;
  }
  const int request = below - 1;
  if (request < 0 || request >= params.requests) return {0, 0};
  const int first = min(max(__ldg(params.cu_seqlens_kv + request), 0), params.s_kv);
  return {first, min(__ldg(params.cu_seqlens_kv + request + 1), params.s_kv) - first};
}

// An unconditional load of this is what a lane does that has no entry: a value that is loaded or else made up is moved, which
// waits for the load.
__device__ const int32_t kNoIndex[1] = {-1};

// The index that a lane of a loading warp looks after: of token 16 warp + lane % 16 of the cursor's block. -1 past the end of
// the list.
__device__ __forceinline__ int32_t load_index(const SparsePrefillParams& params, const Cursor& at) {
  const int in_block = ptx::tid_x() % 128 / 32 * 16 + ptx::tid_x() % 16;
  const bool exists = at.item < params.items && in_block < at.left;
  return ptx::ld_global_nc(exists ? at.entries + in_block : kNoIndex);
}

// Moves a cursor to `item`, or the next of this CTA that has anything to attend to. The same in all lanes of the warp.
__device__ __forceinline__ void enter_item(const SparsePrefillParams& params, Cursor& at, int item) {
  item = next_item(params, item);
  int left = 0;
  Item where{};
  KeyRange keys{};
  if (item < params.items) {
    where = item_at(params, item);
    left = list_length(params, where.token);
    keys = keys_of(params, where.token);
  }
  __syncwarp();  // the lanes have read what the cursor was
  if (ptx::tid_x() % 32 == 0) {
    at.entries = params.indices + where.token * params.indices_stride_token;
    at.kv = reinterpret_cast<const uint8_t*>(params.kv) + (int64_t)keys.first * params.kv_row_bytes;
    at.item = item;
    at.left = left;
    at.kv_rows = keys.rows;
  }
  __syncwarp();
}

__device__ __forceinline__ void next_block(const SparsePrefillParams& params, Cursor& at) {
  if (at.left <= 64) {
    enter_item(params, at, at.item + gridDim.x);
    return;
  }
  __syncwarp();
  if (ptx::tid_x() % 32 == 0) {
    at.entries += 64;
    at.left -= 64;
  }
  __syncwarp();
}

// Brings an item's rows of Q to the L2: eight rows by each of the eight loading warps.
template <class Config>
__device__ __forceinline__ void prefetch_query(const SparsePrefillParams& params, int item, int half) {
  if (item >= params.items) return;
  const Item at = item_at(params, item);
  const int row = 32 * half + ptx::tid_x() % 128 / 4;  // a quarter of a row each
  if (at.first_head + row >= params.h_q) return;
  const bf16_t* q = query_row(params, at, row) + ptx::tid_x() % 4 * (Config::kHeadDimQK / 4);
#pragma unroll
  for (int dim = 0; dim < Config::kHeadDimQK / 4; dim += 64) ptx::prefetch_l2(q + dim);
}

}  // namespace flashmla::sparse_prefill
